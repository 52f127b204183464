"""What scripts and callbacks for TRL read of the trainer, and the names of its arguments."""

import json
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from ppo_core import ConfigError, PPOConfig, PPOTrainer
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.ppo_core.training.test_trainer import CONFIG, PROMPTS, make_trainer

ONE_UPDATE = replace(CONFIG, total_episodes=8, batch_size=8, response_length=4)


class Noted(TrainerCallback):
    """Keeps the models and the events of a run."""

    def __init__(self):
        self.models, self.logged, self.evaluated = [], [], []

    def on_train_begin(self, args, state, control, *, model, **others):
        self.models.append(model)

    def on_log(self, args, state, control, *, logs, **others):
        self.logged.append(logs)

    def on_evaluate(self, args, state, control, *, metrics, **others):
        self.evaluated.append(metrics)


def test_a_script_reads_the_models_and_the_optimizer(tmp_path):
    policy, reference, value_model = make_policy(), make_policy(), make_classifier()
    reward_model = make_classifier(seed=4)
    noted = Noted()
    trainer = make_trainer(
        replace(ONE_UPDATE, output_dir=str(tmp_path)),
        model=policy,
        ref_model=reference,
        reward_model=reward_model,
        value_model=value_model,
        callbacks=[noted],
    )
    before = {name: p.clone() for name, p in trainer.model.policy.named_parameters()}
    trainer.train()
    assert trainer.model.policy is trainer.policy_model is policy
    assert trainer.model.value_model is trainer.value_model is value_model
    assert (trainer.ref_model, trainer.reward_model) == (reference, reward_model)
    assert noted.models == [trainer.model] == [trainer.model_wrapped]
    assert trainer.model.config is policy.config
    after = dict(trainer.model.policy.named_parameters())
    assert any(not after[name].equal(value) for name, value in before.items())
    steps = ONE_UPDATE.num_ppo_epochs * ONE_UPDATE.num_mini_batches
    assert trainer.lr_scheduler.last_epoch == steps
    assert trainer.optimizer.param_groups[0]["lr"] == trainer.lr_scheduler.get_last_lr()[0]
    assert trainer.train_dataset is PROMPTS
    assert trainer.tokenizer is trainer.processing_class


def test_a_made_reference_and_critic_have_names_too():
    trainer = make_trainer(ref_model=None)
    assert trainer.ref_model is trainer.reference.model
    assert trainer.value_model is trainer.critic


def test_a_script_logs_evaluates_and_removes_callbacks(tmp_path):
    noted = Noted()
    trainer = make_trainer(replace(ONE_UPDATE, output_dir=str(tmp_path)), callbacks=[noted])
    with pytest.raises(ConfigError, match="no prompts to evaluate"):
        trainer.evaluate()
    metrics = trainer.evaluate(PROMPTS[:2])
    assert noted.evaluated == [metrics]
    trainer.log({"loss": 1.0}, start_time=time.time())
    assert noted.logged[-1]["loss"] == 1.0
    assert noted.logged[-1]["runtime"] >= 0
    trainer.save_state()
    saved = json.loads((tmp_path / "trainer_state.json").read_text())
    assert [set(entry) & {"loss", "eval/scores"} for entry in saved["log_history"]] == [
        {"eval/scores"},
        {"loss"},
    ]
    assert noted in trainer.callback_handler.callbacks
    assert trainer.pop_callback(Noted) is noted
    assert trainer.pop_callback(Noted) is None
    assert not trainer.control.should_training_stop


def test_a_run_of_max_steps_has_that_many_updates():
    config = replace(CONFIG, total_episodes=None, max_steps=3)
    trainer = make_trainer(config)
    assert (trainer.schedule.num_updates, trainer.state.max_steps) == (3, 3)
    assert trainer.schedule.total_episodes == 3 * 16


@pytest.mark.parametrize(
    ("given", "updates", "sizes"),
    [
        # batch_size, mini_batch_size, num_mini_batches
        ({"batch_size": 8, "mini_batch_size": 2}, 5, (8, 2, 4)),
        ({"batch_size": 8, "mini_batch_size": 8}, 5, (8, 8, 1)),
        ({"batch_size": 8, "mini_batch_size": 4, "num_mini_batches": 2}, 5, (8, 4, 2)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, 5, (8, 8, 1)),
        (
            {
                "batch_size": 8,
                **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
            },
            5,
            (8, 8, 1),
        ),
        ({"batch_size": 8, "max_steps": 3}, 3, (8, 8, 1)),
        ({"batch_size": 8, "max_steps": 9}, 5, (8, 8, 1)),
        ({"batch_size": 8, "save_only_model": True}, 5, (8, 8, 1)),
    ],
)
def test_a_script_reads_the_sizes_that_trl_computes(given, updates, sizes):
    trainer = make_trainer(PPOConfig(total_episodes=37, response_length=4, **given))
    args = trainer.args
    assert (args.batch_size, args.mini_batch_size, args.num_mini_batches) == sizes
    assert trainer.schedule.steps_per_update == 4 * sizes[2]
    assert (args.num_total_batches, args.total_episodes) == (updates, 8 * updates)
    assert (args.world_size, args.local_batch_size, args.local_mini_batch_size) == (1, 8, sizes[1])
    assert args.micro_batch_size == args.train_batch_size == args.per_device_train_batch_size
    assert (args.process_index, args.n_gpu, args.device.type) == (0, 0, "cpu")
    # The settings of the trainer make another trainer.
    assert make_trainer(replace(args, seed=2)).schedule == trainer.schedule


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": 8, "mini_batch_size": 3}, "of mini_batch_size=3"),
        ({"batch_size": 8, "mini_batch_size": 2, "num_mini_batches": 2}, "of mini_batch_size=2"),
        ({"batch_size": 9, "gradient_accumulation_steps": 2}, "batch_size=9 contradicts"),
        ({"mini_batch_size": 0}, "mini_batch_size=0 must be a whole number"),
        ({"world_size": 2}, "world_size=2 is not supported"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(given, words: str):
    with pytest.raises(ConfigError, match=words):
        make_trainer(PPOConfig(response_length=4, **given))


class Endless(torch.utils.data.Dataset):
    """A data set of torch with a length, and a row for every number."""

    def __len__(self):
        return 8

    def __getitem__(self, row):
        return {"input_ids": torch.tensor([4, 5 + row % 8])}


def test_a_data_set_of_torch_has_as_many_prompts_as_its_length():
    trainer = make_trainer(ONE_UPDATE, prompts=Endless())
    assert len(trainer.train_dataset) == 8
    assert trainer._prompts.training.tokens == [[4, 5 + row] for row in range(8)]


class ReadsSizes(TrainerCallback):
    """Reads in each event what scripts for TRL read."""

    def __init__(self):
        self.read = []

    def on_step_end(self, args, state, control, **others):
        names = "num_total_batches world_size batch_size local_batch_size mini_batch_size"
        self.read.append([getattr(args, name) for name in names.split()] + [state.episode])


def test_a_callback_reads_the_sizes_and_the_episode():
    callback = ReadsSizes()
    trainer = make_trainer(replace(ONE_UPDATE, total_episodes=16), callbacks=[callback])
    trainer.train()
    assert callback.read == [[2, 1, 8, 8, 4, 8], [2, 1, 8, 8, 4, 16]]
    assert trainer.state.episode == 16
    assert (trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled) == (False, False)


@pytest.mark.parametrize("name", ["linear", "cosine_with_restarts", "polynomial"])
def test_a_schedule_of_transformers_is_taken_by_its_name(name: str):
    trainer = make_trainer(replace(ONE_UPDATE, lr_scheduler_type=name))
    assert trainer.train()[0]["lr"] > 0


def test_a_script_logs_its_settings():
    config = PPOConfig(hub_token="hf_secret", reward_weights=[1.0, 2.0], seed=3)
    assert config.to_dict()["seed"] == json.loads(config.to_json_string())["seed"] == 3
    assert config.to_sanitized_dict()["reward_weights"] == "[1.0, 2.0]"
    for told in (config.to_dict(), config.to_sanitized_dict(), config.to_json_string()):
        assert "hub_token" not in told


@pytest.mark.parametrize("name", ["world_size", "num_total_batches", "batch_size", "device"])
def test_what_trl_computes_cannot_be_assigned(name: str):
    trainer = make_trainer(ONE_UPDATE)
    with pytest.raises(ConfigError, match=f"{name}=2 was set after the trainer was created"):
        setattr(trainer.args, name, 2)


def test_arguments_have_their_older_names_too():
    models = {"policy": make_policy(), "ref_policy": make_policy(), "reward_model": len}
    trainer = PPOTrainer(config=CONFIG, tokenizer=make_tokenizer(), train_dataset=PROMPTS, **models)
    assert trainer.policy_model is models["policy"]
    assert trainer.ref_model is models["ref_policy"]
    with pytest.raises(ConfigError, match="policy and model are two names"):
        PPOTrainer(CONFIG, make_tokenizer(), policy=nn.Module(), model=nn.Module())


def test_a_learning_rate_of_0_measures_and_trains_nothing(tmp_path):
    policy = make_policy()
    before = {name: p.clone() for name, p in policy.named_parameters()}
    config = replace(ONE_UPDATE, learning_rate=0.0, output_dir=str(tmp_path))
    trainer = make_trainer(config, model=policy)
    trainer.train()
    assert all(p.equal(before[name]) for name, p in policy.named_parameters())
    assert trainer.state.log_history[-1]["val/ratio_var"] < 1e-12


def test_a_setting_that_is_changed_too_late_is_refused():
    trainer = make_trainer(replace(CONFIG))
    with pytest.raises(ConfigError, match="kl_coef=1 was set after the trainer was created"):
        trainer.args.kl_coef = 1


def late_learning_rate(config):
    config.learning_rate = 1e-4


def late_folder(config):
    config.output_dir = "another"


def late_weights(config):
    config.reward_weights.append(1.0)


def late_report(config):
    config.report_to = []


def late_steps(config):
    setattr(config, "max_steps", 3)  # noqa: B010 - as a loop over names does


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (late_learning_rate, "learning_rate=0.0001"),
        (late_folder, "output_dir='another'"),
        (late_weights, r"reward_weights=\[2.0, 1.0\]"),
        (late_report, r"report_to=\[\]"),
        (late_steps, "max_steps=3"),
    ],
)
def test_a_change_of_the_scripts_own_settings_is_refused_before_the_training(change, name: str):
    config = replace(ONE_UPDATE, reward_weights=[2.0])
    trainer = make_trainer(config)
    change(config)
    with pytest.raises(ConfigError, match=f"{name} was set after the trainer was created"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_settings_may_change_between_two_trainers():
    config = replace(ONE_UPDATE)
    make_trainer(config).train()
    config.learning_rate = 1e-4
    trainer = make_trainer(config)
    trainer.train()
    assert trainer.args.learning_rate == 1e-4
