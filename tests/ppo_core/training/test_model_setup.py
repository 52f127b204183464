"""What scripts hand over: who is trained, who stays, and who is refused."""

import copy
import dataclasses
import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.adapters import add_adapter, add_critic_adapter, using_adapter
from ppo_core.models.backbones import freeze_unread_parts
from ppo_core.models.critic import Critic
from ppo_core.models.model_with_value_head import AutoModelForCausalLMWithValueHead
from ppo_core.models.reference import create_reference_model
from ppo_core.models.reward_adapter import load_reward_adapter
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.optimizer import parameter_groups
from ppo_core.training.model_setup import disable_dropout
from tests.architectures.zoo import small_model
from tests.helpers.models.families import DECODERS, make_model
from tests.helpers.models.tiny import make_classifier, make_policy, make_prompts, make_tokenizer
from tests.ppo_core.models.test_adapters import save_classifier, spread
from tests.ppo_core.training.test_trainer import CONFIG as WHOLE_CONFIG
from tests.ppo_core.training.test_trainer import make_trainer as make_whole_trainer

TARGETS = ["q_proj", "v_proj", "down_proj"]
CONFIG = dataclasses.replace(
    WHOLE_CONFIG,
    total_episodes=16,
    batch_size=8,
    per_device_train_batch_size=4,
    local_rollout_forward_batch_size=8,
)


def make_trainer(config=CONFIG, **parts):
    return make_whole_trainer(config, **parts)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_parts_that_read_no_text_are_not_trained(name: str):
    policy = small_model(name)
    before = {name: value.clone() for name, value in policy.named_parameters()}
    make_trainer(model=policy, ref_model=None).train()
    kept = {name for name, value in policy.named_parameters() if value.equal(before[name])}
    assert kept == {name for name, value in policy.named_parameters() if not value.requires_grad}
    assert kept and all("vision_tower" in name or "projector" in name for name in kept)


def test_an_encoder_of_texts_is_trained():
    model = make_model("t5")
    freeze_unread_parts(model)
    assert all(value.requires_grad for value in model.parameters())


def lora(**settings) -> LoraConfig:
    return LoraConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM", **settings)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def moved(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    now = dict(module.named_parameters())
    return {name for name, value in before.items() if not torch.equal(now[name], value)}


def score_some(reward: RewardModel) -> Tensor:
    return reward.score_encoded(make_prompts([9, 4, 6]), batch_size=2)


# --- Policy and reference ---


def test_the_adapter_of_a_policy_is_merged_before_another_is_added(tmp_path, caplog):
    adapted = add_adapter(make_policy(), lora())
    spread(adapted, "default", seed=3)
    before = values_of(adapted)
    merged = copy.deepcopy(adapted).merge_and_unload()
    trainer = make_trainer(model=adapted, ref_model=None, peft_config=lora())
    assert "adapter is merged into a copy of its base" in caplog.text
    assert abs(trainer.train()[0]["objective/kl"]) < 1e-4
    assert not moved(adapted, before)
    trainer.save_model(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    assert not saved(ids).logits.equal(merged(ids).logits)
    # The adapter names no base, since its base is nowhere.
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert not config["base_model_name_or_path"]
    again = PeftModel.from_pretrained(merged, tmp_path / "adapter")
    assert_close(again(ids).logits, saved(ids).logits, rtol=0, atol=1e-5)


def test_without_a_reference_the_policy_as_it_starts_is_copied_and_does_not_move():
    policy = make_policy()
    trainer = make_trainer(model=policy, ref_model=None)
    before = values_of(policy)
    assert abs(trainer.train()[0]["objective/kl"]) < 1e-4
    assert trainer.policy.model is policy
    assert moved(policy, before)
    for name, parameter in trainer.reference.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert not parameter.requires_grad


def test_a_model_with_a_value_head_brings_its_own_critic_which_is_trained_in_place():
    model = AutoModelForCausalLMWithValueHead(make_policy())
    reference = AutoModelForCausalLMWithValueHead(make_policy())
    before, of_reference = values_of(model), values_of(reference)
    trainer = make_trainer(model=model, ref_model=reference)
    assert trainer.critic.head is model.v_head.summary
    assert trainer.critic.backbone is trainer.policy.backbone
    history = trainer.train()
    assert abs(history[0]["objective/kl"]) < 1e-4
    assert {"v_head.summary.weight", "pretrained_model.lm_head.weight"} <= moved(model, before)
    assert not moved(reference, of_reference)


def test_a_value_model_takes_the_place_of_the_policys_own_head():
    classifier = make_classifier()
    trainer = make_trainer(
        model=AutoModelForCausalLMWithValueHead(make_policy()), value_model=classifier
    )
    assert trainer.critic.model is classifier.model


def test_a_classifier_as_value_model_is_trained_in_place_with_its_head():
    classifier = make_classifier(seed=4)
    before = values_of(classifier)
    make_trainer(value_model=classifier).train()
    assert {"score.weight", "model.layers.0.self_attn.q_proj.weight"} <= moved(classifier, before)


def test_a_shared_critic_is_a_new_head_on_the_policys_backbone():
    trainer = make_trainer(dataclasses.replace(CONFIG, shared_critic=True))
    assert trainer.critic.backbone is trainer.policy.backbone
    assert (trainer.critic.head.weight == 0).all()
    trainer.step()
    assert (trainer.critic.head.weight != 0).any()


# --- Adapters ---


def test_an_adapter_has_its_base_for_a_reference_which_never_moves():
    base = make_policy("qwen2")
    before = values_of(base)
    trainer = make_trainer(model=base, ref_model=None, peft_config=lora())
    history = trainer.train()
    assert abs(history[0]["objective/kl"]) < 1e-4
    assert abs(trainer.step()["objective/kl"]) > 1e-3
    after = {name.replace(".base_layer", ""): p for name, p in base.named_parameters()}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_model_that_has_an_adapter_already_needs_no_configuration_for_one():
    adapted = add_adapter(make_policy("qwen2"), lora())
    before = values_of(adapted)
    trainer = make_trainer(model=adapted, ref_model=None)
    trainer.train()
    assert trainer.model.policy is adapted
    assert moved(adapted, before)
    assert all(".lora_" in name for name in moved(adapted, before))


def test_adapters_by_name_are_policy_and_reference(tmp_path):
    model = add_adapter(make_policy("qwen2"), lora(), "old")
    model.add_adapter("new", lora())
    model.eval()
    spread(model, "old", 1)
    spread(model, "new", 2)
    assert model.active_adapter == "old"
    before = values_of(model)
    config = dataclasses.replace(CONFIG, model_adapter_name="new", ref_adapter_name="old")
    trainer = make_trainer(config, model=model, ref_model=None)
    # They differ from the start, and both from the base.
    assert trainer.train()[0]["objective/kl"] > 1e-2
    changed = moved(model, before)
    assert changed and all(".new." in name for name in changed)
    asking = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert asking and all(".new." in name for name in asking)
    ids = torch.tensor([[5, 6, 7]])
    for part, name in ((trainer.policy, "new"), (trainer.reference, "old")):
        with torch.no_grad(), using_adapter(model, name):
            expected = model.get_base_model()(ids).logits
            assert_close(part.logits(part.backbone.hidden_states(ids)[0]), expected[0])

    trainer.save_model(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad(), using_adapter(model, "new"):
        assert_close(saved(ids).logits, model.get_base_model()(ids).logits, rtol=0, atol=1e-5)


def adapters_only(tmp_path):
    """Policy, critic and reward model as adapters of one base."""
    base = make_policy("qwen2")
    save_classifier(base, tmp_path)
    model = add_adapter(base, lora(), "policy")
    add_critic_adapter(model, lora())
    reward = RewardModel(load_reward_adapter(model, tmp_path / "reward"), make_tokenizer())
    return model, Critic.on_adapter(model), reward


@pytest.mark.parametrize("is_given", [True, False])
def test_full_rlhf_with_adapters_only(is_given: bool, tmp_path):
    model, critic, reward = adapters_only(tmp_path)
    given = critic if is_given else None
    trainer = make_trainer(model=model, ref_model=None, value_model=given, reward_model=reward)
    critic = trainer.critic
    before, of_head, scores = values_of(model), values_of(critic.head), score_some(reward)
    history = trainer.train()
    assert abs(history[0]["objective/kl"]) < 1e-4
    assert abs(history[1]["objective/kl"]) > 1e-4
    changed = moved(model, before)
    for adapter in ("policy", "critic"):
        of_adapter = {name for name in before if f".{adapter}." in name}
        # At first lora_B is 0 and only it has a gradient; from the second step on both have.
        assert of_adapter and of_adapter <= changed
        changed -= of_adapter
    assert not changed
    assert moved(critic.head, of_head) == {"weight", "bias"}
    assert torch.equal(score_some(reward), scores)


def test_a_critic_adapter_has_the_critics_learning_rate(tmp_path):
    model, critic, reward = adapters_only(tmp_path)
    config = dataclasses.replace(
        CONFIG, critic_learning_rate=0.5, critic_warmup_updates=2, total_episodes=48
    )
    trainer = make_trainer(
        config, model=model, ref_model=None, value_model=critic, reward_model=reward
    )
    names = {id(p): name for name, p in trainer._train_state.module.named_parameters()}
    for group in parameter_groups(trainer.policy, trainer.critic, config):
        own = {names[id(p)] for p in group["params"]}
        assert group["lr"] == (0.5 if group["name"] == "critic" else CONFIG.learning_rate)
        assert all(
            (".critic." in n or n.startswith("critic.")) == (group["name"] == "critic") for n in own
        )
    before = values_of(model)
    trainer.step(), trainer.step()
    assert {name for name in before if ".critic." in name} == moved(model, before)


def test_checkpointed_adapters_learn_what_plain_ones_do(tmp_path):
    weights = []
    for checkpointing in (False, True):
        model, critic, reward = adapters_only(tmp_path)
        spread(model, "policy", 1)
        spread(model, "critic", 2)
        torch.manual_seed(3)
        nn.init.normal_(critic.head.weight, std=0.1)
        trained = [p for p in [*model.parameters(), *critic.head.parameters()] if p.requires_grad]
        config = dataclasses.replace(CONFIG, gradient_checkpointing=checkpointing)
        trainer = make_trainer(
            config,
            model=model,
            ref_model=None,
            value_model=critic,
            reward_model=reward,
            optimizers=(torch.optim.SGD(trained, lr=0.01), None),
        )
        trainer.step()
        weights.append(values_of(model))
    for name, value in weights[0].items():
        assert_close(weights[1][name], value, rtol=0, atol=1e-6, msg=name)


# --- Refusals ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: {"model": (same := make_policy()), "ref_model": same}, "same object"),
        (
            lambda: {
                "model": AutoModelForCausalLMWithValueHead(same := make_policy()),
                "ref_model": same,
            },
            "same object",
        ),
        (
            lambda: {
                "value_model": (same := make_classifier()),
                "reward_model": RewardModel(same, make_tokenizer()),
            },
            "scores would change",
        ),
        (
            lambda: {
                "value_model": Critic.from_classifier(same := make_classifier()),
                "reward_model": RewardModel(same, make_tokenizer()),
            },
            "scores would change",
        ),
        (lambda: {"model": make_policy().requires_grad_(False)}, "so the policy would not learn"),
        (lambda: {"model": make_classifier()}, "Pass a transformers causal language model"),
        (lambda: {"value_model": make_policy()}, "one value at every token"),
    ],
    ids=[
        "policy and reference",
        "inside a value head",
        "critic and reward",
        "critic on the reward",
        "frozen",
        "classifier as policy",
        "policy as critic",
    ],
)
def test_models_that_cannot_play_their_part_are_refused(make, words):
    with pytest.raises(ModelError, match=words):
        make_trainer(**make())


def test_layers_that_policy_and_reference_keep_frozen_may_be_shared():
    policy = make_policy()
    reference = create_reference_model(policy, num_shared_layers=1)
    assert make_trainer(model=policy, ref_model=reference).step()


def test_a_frozen_policy_with_a_critic_that_learns_is_refused(tmp_path):
    model, critic, reward = adapters_only(tmp_path)
    for name, parameter in model.named_parameters():
        if ".policy." in name:
            parameter.requires_grad_(False)
    with pytest.raises(ModelError, match="so the policy would not learn"):
        make_trainer(model=model, ref_model=None, value_model=critic, reward_model=reward)


@pytest.mark.parametrize(
    ("changes", "make", "words"),
    [
        ({"model_adapter_name": "new"}, dict, "without adapters"),
        ({"ref_adapter_name": "old"}, dict, "without adapters"),
        (
            {"ref_adapter_name": "default"},
            lambda: {"peft_config": lora(), "model": make_policy("qwen2")},
            "both set the reference",
        ),
        (
            {"shared_critic": True},
            lambda: {"value_model": make_classifier()},
            "both set the critic",
        ),
        (
            {"reference_refresh_updates": 1},
            lambda: {"peft_config": lora(), "model": make_policy("qwen2"), "ref_model": None},
            "shares the policy's weights",
        ),
        (
            {"reference_refresh_updates": 1},
            lambda: {"ref_model": make_policy("gpt2")},
            "has other parameters",
        ),
    ],
)
def test_settings_that_contradict_the_models_are_refused(changes, make, words):
    with pytest.raises(ConfigError, match=words):
        make_trainer(dataclasses.replace(CONFIG, **changes), **make())


def test_a_name_that_no_adapter_has_is_refused():
    config = dataclasses.replace(CONFIG, model_adapter_name="other")
    with pytest.raises(ModelError, match="There is no adapter 'other'"):
        make_trainer(config, model=make_policy("qwen2"), ref_model=None, peft_config=lora())


def test_an_optimizer_without_the_critic_is_refused():
    # TRL #2463: its critic never moved.
    policy = make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"leaves out \d+ trained parameters.*critic"):
        make_trainer(model=policy, optimizers=(optimizer, None))


# --- Dropout ---

DROPOUTS = {
    "bloom": ["attention_dropout", "hidden_dropout"],
    "gpt2": ["attn_pdrop", "resid_pdrop", "embd_pdrop"],
    "gpt_neox": ["attention_dropout", "hidden_dropout"],
    "llama": ["attention_dropout"],
    "opt": ["attention_dropout", "dropout", "layerdrop"],
    "phi3": ["attention_dropout", "resid_pdrop", "embd_pdrop"],
    "qwen2": ["attention_dropout"],
}


@pytest.mark.parametrize("family", DROPOUTS)
def test_no_dropout_is_left_in_training_mode(family):
    config = copy.deepcopy(DECODERS[family])
    for name in DROPOUTS[family]:
        setattr(config, name, 0.5)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(make_model(family).state_dict())
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = model.eval()(ids, use_cache=False).logits
    assert not torch.allclose(model.train()(ids, use_cache=False).logits, expected, atol=1e-2)
    disable_dropout(model)
    assert_close(model(ids, use_cache=False).logits, expected)


def test_no_dropout_of_an_adapter_is_left_in_training_mode():
    peft = pytest.importorskip("peft")
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    settings = {"target_modules": TARGETS}
    for config in (
        lora(lora_dropout=0.5),
        peft.LoHaConfig(r=3, rank_dropout=0.5, module_dropout=0.5, **settings),
    ):
        model = add_adapter(make_policy("qwen2"), config, "policy")
        spread(model, "policy", 1)
        expected = model.eval()(ids).logits
        assert not torch.allclose(model.train()(ids).logits, expected, atol=1e-3)
        disable_dropout(model)
        assert_close(model(ids).logits, expected)
