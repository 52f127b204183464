"""What a run leaves behind: checkpoints it goes on from to the bit, and a policy that loads."""

import dataclasses
import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, TrainerCallback

from ppo_core.data.model_files import replaced_together, save_tokenizer
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.models.loading import load_policy
from ppo_core.ppo.schedule import Schedule
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_policy, make_tokenizer
from tests.helpers.slow_cases import slow
from tests.ppo_core.training.test_trainer import CLOCKS, CONFIG, make_trainer, weights

LONG = dataclasses.replace(
    CONFIG,
    total_episodes=64,
    save_strategy="steps",
    save_steps=2,
    use_score_scaling=True,
    kl_target=1.0,
    ema_decay=0.5,
    reference_refresh_updates=2,
    critic_learning_rate=2e-3,
)


class StopAfter(TrainerCallback):
    def __init__(self, updates):
        self.updates = updates

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.updates


def without_clocks(history):
    return [{k: v for k, v in metrics.items() if k not in CLOCKS} for metrics in history]


def everything(trainer):
    moments = trainer._train_state.optimizer.state_dict()["state"]
    return [
        *weights(trainer).values(),
        *trainer.critic.parameters(),
        *trainer.reference.parameters(),
        *trainer._average.tensors().values(),
        *(moments[number][name] for number in sorted(moments) for name in sorted(moments[number])),
    ]


def test_a_run_that_was_interrupted_goes_on_to_the_bit(tmp_path):
    whole = make_trainer(dataclasses.replace(LONG, output_dir=str(tmp_path / "whole")))
    expected = whole.train()

    config = dataclasses.replace(LONG, output_dir=str(tmp_path / "parts"), save_steps=10)
    make_trainer(config, callbacks=[StopAfter(2)]).train()
    torch.manual_seed(99)
    second = make_trainer(config)
    rest = second.train(resume_from_checkpoint=True)

    assert without_clocks(rest) == without_clocks(expected[2:])
    for a, b in zip(everything(second), everything(whole), strict=True):
        assert torch.equal(a, b)
    assert [entry["step"] for entry in second.state.log_history] == [1, 2, 3, 4]


def test_a_checkpoint_of_other_settings_is_refused_by_the_name_of_the_difference(tmp_path):
    config = dataclasses.replace(LONG, output_dir=str(tmp_path))
    make_trainer(config, callbacks=[StopAfter(2)]).train()
    other = dataclasses.replace(config, cliprange=0.3)
    with pytest.raises(TrainingError, match=r"written with cliprange=0\.2, which is now 0\.3"):
        make_trainer(other).train(resume_from_checkpoint=tmp_path / "checkpoint-2")


def test_the_number_of_checkpoints_is_limited_and_a_checkpoint_is_a_plain_model(tmp_path):
    config = dataclasses.replace(LONG, output_dir=str(tmp_path), save_steps=1, save_total_limit=2)
    trainer = make_trainer(config)
    trainer.train()
    folders = sorted(folder.name for folder in tmp_path.glob("checkpoint-*"))
    assert folders == ["checkpoint-3", "checkpoint-4"]
    loaded = load_policy(tmp_path / "checkpoint-4").state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights(trainer).items())


def test_with_a_running_mean_it_is_the_mean_that_is_saved(tmp_path):
    trainer = make_trainer(dataclasses.replace(LONG, output_dir=str(tmp_path)))
    trainer.train()
    before = weights(trainer)
    trainer.save_model(tmp_path / "policy")
    saved = load_policy(tmp_path / "policy").state_dict()
    mean = trainer._average.tensors()
    name = "model.embed_tokens.weight"
    assert torch.equal(saved[name], mean[f"model.{name}"])
    assert not torch.equal(saved[name], before[name])
    assert all(torch.equal(weight, before[n]) for n, weight in weights(trainer).items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_policy_in_half_precision_is_saved_in_it(tmp_path, family):
    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path), total_episodes=16, bf16=False)
    policy = make_policy(family).to(torch.bfloat16)
    trainer = make_trainer(config, model=policy, ref_model=None)
    trainer.train()
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    trained = weights(trainer)
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trained[name].bfloat16())


def test_a_saved_policy_stops_at_the_end_of_a_turn_and_at_its_own_token(tmp_path):
    model, tokenizer = make_policy(), make_chat_tokenizer()
    model.generation_config.eos_token_id = 5
    model.save_pretrained(tmp_path)
    for _ in range(2):
        save_tokenizer(tokenizer, tmp_path)
        stops = GenerationConfig.from_pretrained(tmp_path).eos_token_id
        assert stops == [tokenizer.eos_token_id, 5]


@pytest.mark.parametrize("eval_strategy", ["no", "steps"])
def test_the_model_card_names_settings_and_last_metrics(eval_strategy, tmp_path):
    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path), eval_strategy=eval_strategy)
    trainer = make_trainer(config, eval_dataset=["w1 w2"])
    last = trainer.train()[-1]
    trainer.create_model_card("tiny", "posts", ["short"])
    card = (tmp_path / "README.md").read_text().replace("\\", "")
    assert "kl_coef" in card
    assert "objective/scores" in card
    assert "- short" in card
    assert f"{last['objective/scores']:.4g}"[:5] in card
    assert ("eval/scores" in card) == (eval_strategy == "steps")


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    config = dataclasses.replace(LONG, output_dir=str(tmp_path))
    make_trainer(config).train()
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["step"] == 4
    again = make_trainer(config, model=make_policy(seed=3))
    assert again.train(resume_from_checkpoint=True) == []


def saved_policies(folder):
    return {
        int(each.name): load_policy(each).state_dict() for each in (folder / "policies").iterdir()
    }


@pytest.mark.parametrize(
    ("updates", "number", "expected"),
    [
        (4, 1, [2]),
        (4, 3, [1, 2, 3]),
        (60, 3, [15, 30, 45]),
        (10, 3, [2, 5, 7]),
        (9, 0, []),
    ],
)
def test_earlier_policies_are_at_equal_distances(updates, number, expected):
    assert Schedule(batch_size=1, num_updates=updates, steps_per_update=1).between(number) == (
        expected
    )


def test_for_any_size_the_earlier_policies_are_different_and_before_the_end():
    for updates in range(1, 40):
        schedule = Schedule(batch_size=1, num_updates=updates, steps_per_update=1)
        for number in range(updates):
            assert len({*schedule.between(number)} & {*range(1, updates)}) == number


@pytest.mark.parametrize(
    "changes", [{"ema_decay": 0.5}, *slow({}, {"save_steps": 1}, {"lora": True})]
)
def test_an_earlier_policy_is_what_a_run_saves_that_stops_there(changes, tmp_path):
    changes, adapted = dict(changes), {}
    config = dataclasses.replace(LONG, lr_scheduler_type="constant", ema_decay=None)
    if changes.pop("lora", False):
        adapted = {"ref_model": None, "peft_config": LoraConfig(r=2)}
        config = dataclasses.replace(config, reference_refresh_updates=0)

    def begin(name, **more):
        settings = dataclasses.replace(config, output_dir=str(tmp_path / name), **changes)
        return make_trainer(dataclasses.replace(settings, **more), **adapted)

    trainer = begin("with", save_policies=2, save_total_limit=2)
    history = trainer.train()
    saved = saved_policies(tmp_path / "with")
    assert sorted(saved) == [1, 2]
    for update, policy in saved.items():
        stopped = make_trainer(
            dataclasses.replace(config, output_dir=str(tmp_path / f"stopped-{update}"), **changes),
            callbacks=[StopAfter(update)],
            **adapted,
        )
        stopped.train()
        stopped.save_model(tmp_path / f"policy-{update}")
        expected = load_policy(tmp_path / f"policy-{update}").state_dict()
        assert all(torch.equal(policy[name], weight) for name, weight in expected.items())
        folders = (tmp_path / f"policy-{update}", tmp_path / "with" / "policies" / str(update))
        of_policy, of_earlier = ({p.name for p in folder.rglob("*")} for folder in folders)
        assert of_policy == of_earlier
        assert ("adapter" in of_earlier) == bool(adapted)

    without = begin("without")
    assert without_clocks(without.train()) == without_clocks(history)
    assert all(torch.equal(weights(without)[name], w) for name, w in weights(trainer).items())
    assert not (tmp_path / "without" / "policies").exists()


@pytest.mark.slow
def test_a_run_that_goes_on_has_all_earlier_policies_or_says_which_are_missing(tmp_path):
    config = dataclasses.replace(LONG, save_policies=3)
    whole, parts = (
        dataclasses.replace(config, output_dir=str(tmp_path / name)) for name in ("whole", "parts")
    )
    make_trainer(whole).train()
    make_trainer(parts, callbacks=[StopAfter(2)]).train()
    # A policy that a killed process was writing, after the checkpoint.
    (tmp_path / "parts" / "policies" / "3" / ".unfinished").mkdir(parents=True)
    make_trainer(parts).train(resume_from_checkpoint=True)
    expected, saved = (saved_policies(tmp_path / name) for name in ("whole", "parts"))
    assert sorted(saved) == [1, 2, 3]
    for update, policy in expected.items():
        assert all(torch.equal(saved[update][name], w) for name, w in policy.items())

    shutil.rmtree(tmp_path / "parts" / "policies" / "2")
    words = r"updates 1, 2, 3\. .* after update 4, .*policies' some .* missing.* save_policies=0"
    with pytest.raises(TrainingError, match=words):
        make_trainer(parts).train(resume_from_checkpoint=True)
    unasked = dataclasses.replace(parts, save_policies=0)
    assert make_trainer(unasked).train(resume_from_checkpoint=True) == []


def test_more_earlier_policies_than_a_run_has_are_refused(tmp_path):
    words = r"save_policies=4 needs more updates: a run of 4 updates has only 3"
    with pytest.raises(ConfigError, match=words):
        make_trainer(dataclasses.replace(LONG, output_dir=str(tmp_path), save_policies=4))


def test_a_rewritten_policy_has_no_file_of_the_policy_before_it(tmp_path):
    chat, text = make_tokenizer(), make_tokenizer()
    chat.chat_template = {"default": "{{ messages }}", "tools": "{{ messages }}"}
    (tmp_path / "notes.json").touch()
    with replaced_together(tmp_path) as folder:
        chat.save_pretrained(folder)
        make_policy().save_pretrained(folder)
        get_peft_model(make_policy(), LoraConfig(r=2)).save_pretrained(folder / "adapter")
        get_peft_model(make_policy(), LoraConfig(r=2)).save_pretrained(folder)
        (folder / "README.md").unlink()
        (folder / "value_head.safetensors").touch()
    with replaced_together(tmp_path) as folder:
        make_policy().save_pretrained(folder)
    # A model that is written without a tokenizer keeps the tokenizer of the folder.
    assert (tmp_path / "tokenizer.json").exists()
    with replaced_together(tmp_path) as folder:
        text.save_pretrained(folder)
        make_policy(seed=1).save_pretrained(folder, max_shard_size="10KB")
        expected = {path.name for path in folder.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {*expected, "notes.json"}
    loaded = load_policy(tmp_path).state_dict()
    assert all(torch.equal(loaded[n], w) for n, w in make_policy(seed=1).state_dict().items())
