"""What would fail late is refused when the trainer is made; what would learn nothing, too."""

import copy
import dataclasses
import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_core import PPOConfig
from ppo_core.errors import ConfigError, DataError, ModelError
from ppo_core.models.reward_model import RewardModel
from tests.helpers.models.chat import ENDED, make_chat_tokenizer, say
from tests.helpers.models.tiny import CONFIGS, make_classifier, make_policy, make_tokenizer
from tests.ppo_core.training.test_export import LONG, StopAfter, without_clocks
from tests.ppo_core.training.test_trainer import CONFIG, PROMPTS, make_trainer, weights


def smaller(make, **changes):
    """A model like the others, but with less room."""
    config = copy.deepcopy(CONFIGS["llama"])
    for name, value in {"num_labels": 1, **changes}.items():
        setattr(config, name, value)
    return make.from_config(config).eval()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"reward_model": smaller(AutoModelForSequenceClassification, vocab_size=20)},
            "reward model .* has embeddings for 20 tokens, but the policy samples 61",
        ),
        (
            {"ref_model": smaller(AutoModelForCausalLM, vocab_size=20)},
            "reference .* has embeddings for 20 tokens",
        ),
        (
            {"value_model": smaller(AutoModelForSequenceClassification, vocab_size=20)},
            "critic .* has embeddings for 20 tokens",
        ),
    ],
)
def test_a_model_that_does_not_know_the_policys_tokens_is_refused(parts, message):
    with pytest.raises(ModelError, match=message):
        make_trainer(**parts)


def test_a_reference_of_more_tokens_is_refused_only_for_the_exact_divergence():
    larger = smaller(AutoModelForCausalLM, vocab_size=70)
    make_trainer(ref_model=larger).step()
    with pytest.raises(ModelError, match="the policy has 61 tokens and the reference 70"):
        make_trainer(dataclasses.replace(CONFIG, kl_estimator="full"), ref_model=larger)


def test_a_reward_model_without_room_for_the_longest_answer_and_its_end_is_refused():
    # The longest prompt has 3 tokens, a response 8: with the end of the text that is 12.
    short = smaller(AutoModelForSequenceClassification, max_position_embeddings=11)
    with pytest.raises(
        DataError, match="12 tokens, but the context length of the reward model is 11"
    ):
        make_trainer(reward_model=RewardModel(short, make_tokenizer()))
    room = smaller(AutoModelForSequenceClassification, max_position_embeddings=12)
    make_trainer(reward_model=RewardModel(room, make_tokenizer()))


def test_a_reward_model_that_reads_texts_is_tried_on_the_prompts_before_training(caplog):
    # The longest prompt has 3 words, a response 8 tokens, and the end of the text one.
    own_words = make_tokenizer(words=40)

    def try_room(room: int) -> None:
        classifier = smaller(AutoModelForSequenceClassification, max_position_embeddings=room)
        make_trainer(reward_model=RewardModel(classifier, own_words))

    with pytest.raises(DataError, match=r"prompt \d has 4 tokens .* length of 4 leaves no room"):
        try_room(4)
    try_room(11)
    assert "has 4 tokens for the reward model. With a response of 8 tokens it may" in caplog.text
    caplog.clear()
    try_room(12)
    assert "for the reward model" not in caplog.text


def test_a_chat_template_of_a_reward_model_is_tried_on_each_order_of_roles():
    prompts = [say("w1"), say("w1", "w2", "w3")]
    tokenizer = make_chat_tokenizer()
    two_turns = "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}" + ENDED
    make_trainer(
        prompts=prompts,
        processing_class=tokenizer,
        reward_model=RewardModel(make_classifier(), make_chat_tokenizer(ENDED)),
    )
    with pytest.raises(DataError, match=r"cannot read the prompt 1: .*too long"):
        make_trainer(
            prompts=prompts,
            processing_class=tokenizer,
            reward_model=RewardModel(make_classifier(), make_chat_tokenizer(two_turns)),
        )


def test_modules_that_an_adapter_trains_in_half_precision_are_refused():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapted = peft.get_peft_model(make_policy("qwen2").bfloat16(), config)
    with pytest.raises(ConfigError, match=r"trains .*lm_head.* in torch.bfloat16"):
        make_trainer(model=adapted, ref_model=None)


def test_the_matrices_of_an_adapter_are_trained_in_fp32():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    base = make_policy("qwen2").bfloat16()
    adapted = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    trained = [one for one in adapted.parameters() if one.requires_grad]
    assert {one.dtype for one in trained} == {torch.bfloat16}
    make_trainer(model=adapted, ref_model=None).train()
    assert {one.dtype for one in trained} == {torch.float32}
    assert adapted.get_base_model().lm_head.weight.dtype == torch.bfloat16


def test_a_base_in_float16_is_refused():
    adapted = peft.get_peft_model(make_policy().half(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="is in float16, in which small gradients become 0"):
        make_trainer(model=adapted, ref_model=None)


def test_a_stop_token_that_does_not_exist_is_refused():
    with pytest.raises(
        ModelError, match="stop_token_id=61 is not one of the policy's 61 token ids"
    ):
        make_trainer(dataclasses.replace(CONFIG, stop_token_id=61))


def test_a_policy_that_transformers_would_not_save_is_refused_before_it_is_trained():
    policy = make_policy()
    policy.generation_config = copy.deepcopy(policy.generation_config)
    policy.generation_config.temperature = 0.9
    with pytest.raises(ModelError, match="refuse to save the trained policy"):
        make_trainer(model=policy)


def test_a_published_generation_config_is_saved_as_it_was_loaded(tmp_path):
    # Many published policies set temperature and top_p, but not do_sample.
    make_policy().save_pretrained(tmp_path / "policy")
    file = tmp_path / "policy/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.9, "top_p": 0.6}))
    trainer = make_trainer(model=AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    trainer.save_model(tmp_path / "trained")
    saved = json.loads((tmp_path / "trained/generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"]) == (0.9, 0.6)


def test_a_dictionary_of_splits_is_not_a_data_set():
    with pytest.raises(DataError, match="a mapping of train, test, not a single data set"):
        make_trainer(prompts={"train": PROMPTS, "test": PROMPTS})


@pytest.mark.parametrize("part", ["model", "value_model"])
def test_weights_in_half_precision_are_trained_in_fp32(part):
    models = {"model": make_policy().bfloat16()}
    if part == "value_model":
        models = {"value_model": make_classifier(seed=3).bfloat16()}
    trainer = make_trainer(dataclasses.replace(CONFIG, learning_rate=3e-6), **models)
    module = trainer.policy if part == "model" else trainer.critic
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert {p.dtype for p in before.values()} == {torch.float32}
    trainer.train()
    moved = sum((p != before[name]).sum().item() for name, p in module.named_parameters())
    assert moved > 0.9 * sum(p.numel() for p in before.values())


def test_a_retry_in_the_same_trainer_goes_on_to_the_bit(tmp_path):
    expected = make_trainer(dataclasses.replace(LONG, output_dir=str(tmp_path / "whole")))
    history = expected.train()
    stop = StopAfter(3)
    config = dataclasses.replace(LONG, output_dir=str(tmp_path / "parts"))
    trainer = make_trainer(config, callbacks=[stop])
    trainer.train()
    stop.updates = 99
    rest = trainer.train(resume_from_checkpoint=tmp_path / "parts" / "checkpoint-2")
    assert without_clocks(rest) == without_clocks(history[2:])
    assert all(torch.equal(w, weights(expected)[name]) for name, w in weights(trainer).items())


def test_a_checkpoint_of_other_prompts_is_refused_and_other_ways_to_log_are_not(tmp_path):
    config = dataclasses.replace(LONG, output_dir=str(tmp_path))
    make_trainer(config, callbacks=[StopAfter(2)]).train()
    with pytest.raises(Exception, match="written with prompts="):
        make_trainer(config, prompts=PROMPTS[::-1]).train(resume_from_checkpoint=True)
    other = dataclasses.replace(config, save_total_limit=3, logging_steps=2, warn_kl=9.0)
    assert len(make_trainer(other).train(resume_from_checkpoint=True)) == 2


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(tmp_path):
    config = dataclasses.replace(LONG, output_dir=str(tmp_path))
    make_trainer(config).train()
    with pytest.raises(ConfigError, match="checkpoint-4' belongs to an earlier run"):
        make_trainer(config).train()


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    config = dataclasses.replace(LONG, output_dir=str(tmp_path / "file" / "run"))
    for strategy in ("steps", "no"):
        with pytest.raises(ConfigError, match=r"output_dir: nothing can be written into .*/run'"):
            make_trainer(dataclasses.replace(config, save_strategy=strategy)).train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": "3e-6"}, "learning_rate='3e-6' must be a number"),
        ({"kl_coef": float("inf")}, "kl_coef=inf must be a finite number"),
        ({"seed": None}, "seed=None must be a whole number"),
        ({"bf16": "yes"}, "bf16='yes' must be True or False"),
        ({"reward_weights": 1.0}, r"reward_weights=1\.0 must be a list of finite numbers"),
        ({"reward_weights": ["1"]}, r"reward_weights=\['1'\] must be a list of finite numbers"),
        ({"kl_target": 6.0, "kl_coef": 0.0}, "stay 0"),
        ({"eval_steps": 5}, "eval_steps=5 would be ignored.*Remove eval_steps, or set eval_strat"),
        ({"kl_in_loss": True}, "kl_in_loss=True has no effect with kl_estimator='k1'"),
        ({"kl_horizon": 100}, "kl_horizon=100 takes effect only with kl_target"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-7}, "=1e-07 must be larger"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**settings)


def test_a_critic_that_warms_up_for_the_whole_run_is_refused():
    with pytest.raises(ConfigError, match="no update for the policy"):
        make_trainer(dataclasses.replace(CONFIG, critic_warmup_updates=2))


def test_a_scheduler_of_another_optimizer_is_refused():
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(other)
    with pytest.raises(ConfigError, match="belongs to another optimizer"):
        make_trainer(optimizers=(None, scheduler))
