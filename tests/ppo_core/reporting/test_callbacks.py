"""Callbacks are told what transformers would tell them, and are heard."""

import importlib.util
import json
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.reporting.callbacks import Reporter, check_integrations, training_arguments
from tests.helpers.models.tiny import make_policy, make_tokenizer

TOKEN = "hf_thisIsASecret"
MISSING = {name for name in ("wandb", "tensorboard") if importlib.util.find_spec(name) is None}


@pytest.fixture(autouse=True)
def one_process() -> None:
    PartialState(cpu=True)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are written to the default output_dir, in the working folder."""
    monkeypatch.chdir(tmp_path)


def make_reporter(
    callbacks=(), *, num_updates: int = 4, is_main: bool = True, **settings
) -> Reporter:
    model = make_policy()
    optimizer = torch.optim.AdamW(model.parameters())
    return Reporter(
        PPOConfig(**settings),
        callbacks=callbacks,
        model=model,
        tokenizer=make_tokenizer(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        num_updates=num_updates,
        is_main=is_main,
    )


def run(reporter: Reporter, num_updates: int) -> dict[str, list[int]]:
    """A run of a trainer that does what it is asked: the steps at which that was what."""
    done = {"evaluate": [], "save": []}
    reporter.begin()
    for step in range(1, num_updates + 1):
        reporter.step_begin()
        reporter.step_end({"objective/kl": step / 10}, epoch=step / 2)
        if reporter.should_evaluate:
            reporter.evaluated({"eval_score": float(step)})
            done["evaluate"].append(step)
        if reporter.should_save:
            reporter.saved()
            done["save"].append(step)
        if reporter.should_stop:
            break
    reporter.end()
    return done


class Recorder(TrainerCallback):
    """Writes down each event, the step of it and what came with it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.details: list[dict] = []

    def __getattribute__(self, name: str):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def event(args, state, control, **details):
            self.events.append((name.removeprefix("on_"), state.global_step))
            self.details.append({"args": args, "state": state, "control": control, **details})

        return event


class Patience(TrainerCallback, ExportableState):
    """Ends the run after so many steps of its own."""

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
        self.count = 0

    def on_step_end(self, args, state, control, **details) -> None:
        self.count += 1
        control.should_training_stop |= self.count >= self.limit

    def state(self) -> dict:
        return {"args": {"limit": self.limit}, "attributes": {"count": self.count}}


# --- The arguments ---


def test_every_setting_that_transformers_has_too_is_carried_over():
    changed = {
        "output_dir": "somewhere",
        "run_name": "run 7",
        "seed": 5,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 5,
        "gradient_accumulation_steps": 7,
        "num_train_epochs": 1.5,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 9,
        "weight_decay": 0.3,
        "adam_beta1": 0.5,
        "adam_beta2": 0.6,
        "adam_epsilon": 1e-3,
        "max_grad_norm": 0.7,
        "bf16": True,
        "gradient_checkpointing": True,
        "use_cpu": True,
        "deepspeed": "no such file.json",
        "ddp_timeout": 21,
        "disable_tqdm": True,
        "report_to": ["none"],
        "logging_steps": 11,
        "eval_strategy": "steps",
        "eval_steps": 13,
        "save_strategy": "no",
        "save_steps": 17,
        "save_total_limit": 19,
        "push_to_hub": True,
        "hub_model_id": "me/model",
        "hub_private_repo": True,
        "hub_token": TOKEN,
    }
    args = training_arguments(PPOConfig(**changed), num_updates=23)
    shared = {each.name for each in fields(PPOConfig)} & {
        each.name for each in fields(TrainingArguments)
    }
    shared -= {"max_steps"}  # the updates of the run, however its length is set
    assert shared == changed.keys(), "a setting is missing above"
    # The trainer pushes, with its own token; transformers says "none" with an empty list.
    expected = changed | {"push_to_hub": False, "hub_token": None, "report_to": []}
    assert {name: getattr(args, name) for name in shared} == expected
    assert args.max_steps == 23
    assert args.logging_strategy == "steps"


def test_the_run_is_called_after_the_experiment_where_it_has_no_name():
    assert training_arguments(PPOConfig(exp_name="tldr"), 1).run_name == "tldr"


def test_a_share_of_warm_up_is_the_share_that_transformers_reads():
    args = training_arguments(PPOConfig(warmup_ratio=0.25), 1)
    assert args.get_warmup_steps(40) == 10


def test_callbacks_find_the_settings_of_ppo_by_their_names():
    args = training_arguments(PPOConfig(kl_coef=0.3, cliprange=0.11), 1)
    assert (args.kl_coef, args.cliprange) == (0.3, 0.11)


def test_what_is_logged_holds_every_setting_as_it_was_given_but_the_token():
    config = PPOConfig(
        kl_coef=0.3, push_to_hub=True, hub_token=TOKEN, deepspeed="ds.json", warmup_ratio=0.1
    )
    args = training_arguments(config, 10)
    given = {name: value for name, value in asdict(config).items() if name != "hub_token"}
    assert given.items() <= args.to_dict().items()
    assert args.to_dict()["dataloader_num_workers"] == 0
    assert json.loads(args.to_json_string())["kl_coef"] == 0.3
    for logged in (args.to_dict(), args.to_sanitized_dict()):
        assert "hub_token" not in logged
    everything = f"{args.to_sanitized_dict()} {args} {args!r} {vars(args)}"
    assert TOKEN not in everything


def test_the_processes_that_the_engine_set_up_stay_as_they_are():
    accelerator = Accelerator(cpu=True)
    training_arguments(PPOConfig(), 1)
    assert accelerator.device == torch.device("cpu")
    assert accelerator.is_main_process


def test_bfloat16_is_accepted_on_a_machine_without_a_gpu():
    assert training_arguments(PPOConfig(bf16=True), 1).bf16


def test_a_value_that_transformers_refuses_is_a_configuration_error():
    config = PPOConfig()
    object.__setattr__(config, "logging_steps", 1.5)  # as if our own check let it through
    with pytest.raises(ConfigError, match=r"logging_steps must be an integer"):
        training_arguments(config, 1)


# --- The events ---


def test_each_event_comes_in_order_and_at_its_step():
    recorder = Recorder()
    reporter = make_reporter(
        [recorder], num_updates=2, eval_strategy="steps", eval_steps=2, save_steps=2
    )
    run(reporter, 2)
    assert recorder.events == [
        ("init_end", 0),
        ("train_begin", 0),
        ("step_begin", 0),
        ("step_end", 1),
        ("log", 1),
        ("step_begin", 1),
        ("step_end", 2),
        ("log", 2),
        ("evaluate", 2),
        ("save", 2),
        ("train_end", 2),
    ]


def test_each_event_brings_what_transformers_brings():
    recorder = Recorder()
    reporter = make_reporter([recorder], num_updates=1, eval_strategy="steps")
    run(reporter, 1)
    model = recorder.details[0]["model"]
    optimizer = recorder.details[0]["optimizer"]
    for details in recorder.details:
        assert details["args"] is reporter.args
        assert details["state"] is reporter.state
        assert details["model"] is model
        assert details["processing_class"].eos_token == "<eos>"
        assert details["optimizer"] is optimizer
        assert details["lr_scheduler"].optimizer is optimizer
    names = [name for name, _ in recorder.events]
    by_name = dict(zip(names, recorder.details, strict=True))
    assert by_name["log"]["logs"] == {"objective/kl": 0.1, "epoch": 0.5}
    assert by_name["evaluate"]["metrics"] == {"eval_score": 1.0}
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


def test_the_history_of_logs_holds_step_and_epoch():
    reporter = make_reporter(logging_steps=2)
    run(reporter, 4)
    assert reporter.state.log_history == [
        {"objective/kl": 0.2, "epoch": 1.0, "step": 2},
        {"objective/kl": 0.4, "epoch": 2.0, "step": 4},
    ]


def test_logged_scalars_become_numbers_and_other_objects_are_refused():
    reporter = make_reporter()
    given = {"a": torch.tensor(1.5), "b": np.float32(2.5), "c": True, "d": "warm-up", "e": [1, 2]}
    reporter.log(given)
    (entry,) = json.loads(json.dumps(reporter.state_dict()["log_history"]))
    assert entry == {"a": 1.5, "b": 2.5, "c": True, "d": "warm-up", "e": [1, 2]} | {
        "epoch": 0,
        "step": 0,
    }
    with pytest.raises(
        ConfigError, match=r"logged value f=tensor\(\[1\., 2\.\]\) cannot be stored"
    ):
        reporter.log({"f": torch.tensor([1.0, 2.0])})


def test_a_callback_that_changes_what_is_logged_does_not_change_the_history():
    class Spoiler(TrainerCallback):
        def on_log(self, args, state, control, logs, **details) -> None:
            logs.clear()

    metrics = {"objective/kl": 1.0}
    reporter = make_reporter([Spoiler])
    reporter.log(metrics)
    assert reporter.state.log_history == [{"objective/kl": 1.0, "epoch": 0, "step": 0}]
    assert metrics == {"objective/kl": 1.0}


def test_evaluations_and_checkpoints_are_due_at_their_steps_and_at_the_end():
    reporter = make_reporter(num_updates=7, eval_strategy="steps", eval_steps=3, save_steps=2)
    assert run(reporter, 9) == {"evaluate": [3, 6, 7], "save": [2, 4, 6, 7]}
    assert reporter.state.global_step == 7, "the run did not end"


def test_steps_below_one_are_shares_of_the_run():
    reporter = make_reporter(
        num_updates=8, logging_steps=0.25, eval_strategy="steps", eval_steps=0.5, save_steps=0.375
    )
    assert run(reporter, 8) == {"evaluate": [4, 8], "save": [3, 6, 8]}
    assert [entry["step"] for entry in reporter.state.log_history] == [2, 4, 6, 8]


def test_nothing_is_evaluated_or_saved_that_was_not_asked_for():
    assert run(make_reporter(save_strategy="no"), 4) == {"evaluate": [], "save": []}


def test_a_wish_of_a_callback_lasts_until_it_is_met_or_the_next_step_begins():
    class Eager(TrainerCallback):
        def on_step_end(self, args, state, control, **details) -> None:
            control.should_evaluate = control.should_save = True

    reporter = make_reporter([Eager()])
    reporter.begin()
    reporter.step_begin()
    reporter.step_end({})
    assert reporter.should_evaluate and reporter.should_save
    reporter.evaluated({})
    assert not reporter.should_evaluate and reporter.should_save
    reporter.saved()
    assert not reporter.should_save
    reporter.step_end({})
    reporter.step_begin()
    assert not reporter.should_evaluate and not reporter.should_save


def test_a_callback_can_end_the_run():
    reporter = make_reporter([Patience(limit=2)], num_updates=9)
    run(reporter, 9)
    assert reporter.should_stop
    assert reporter.state.global_step == 2


def test_a_callback_may_answer_with_a_control_of_its_own():
    class Replacing(TrainerCallback):
        def on_step_end(self, args, state, control, **details):
            return type(control)(should_training_stop=True)

    reporter = make_reporter([Replacing], num_updates=9)
    reporter.begin()
    reporter.step_end({})
    assert reporter.should_stop


def test_callbacks_come_and_go():
    reporter = make_reporter()
    recorder = Recorder()
    reporter.add_callback(recorder)
    reporter.add_callback(Patience)
    assert [type(each) for each in reporter.callbacks[-2:]] == [Recorder, Patience]
    assert reporter.pop_callback(Recorder) is recorder
    reporter.remove_callback(Patience)
    assert not {Recorder, Patience} & {type(each) for each in reporter.callbacks}
    assert reporter.pop_callback(Recorder) is None


def test_callbacks_of_other_processes_know_that_they_are_not_the_main_one():
    state = make_reporter(is_main=False).state
    assert not state.is_world_process_zero
    assert state.is_local_process_zero


# --- Going on with a run ---


def test_a_resumed_run_goes_on_where_it_was():
    first = make_reporter([Patience(limit=5), Patience(limit=9)], num_updates=6)
    run(first, 3)
    saved = json.loads(json.dumps(first.state_dict()))

    recorder = Recorder()
    second = make_reporter([Patience(), recorder, Patience()], num_updates=6)
    second.load_state_dict(saved)
    assert second.state_dict() == first.state_dict()
    patience = [each for each in second.callbacks if isinstance(each, Patience)]
    assert [(each.limit, each.count) for each in patience] == [(5, 3), (9, 3)]
    assert second.callbacks.index(recorder) == second.callbacks.index(patience[0]) + 1
    run(second, 6)
    assert second.state.global_step == 5
    assert [entry["step"] for entry in second.state.log_history] == [1, 2, 3, 4, 5]


def test_a_state_without_its_callback_is_spoken_of():
    saved = make_reporter([Patience()]).state_dict()
    with pytest.warns(UserWarning, match=r"1 state\(s\) of the callback Patience; this run has 0"):
        make_reporter().load_state_dict(saved)


def test_a_saved_state_does_not_change_while_the_run_goes_on():
    reporter = make_reporter()
    saved = reporter.state_dict()
    run(reporter, 1)
    assert saved["log_history"] == [] and saved["global_step"] == 0


# --- The integrations ---


def test_a_place_that_transformers_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"report_to=\['paper'\].*mlflow"):
        make_reporter(report_to="paper")


@pytest.mark.parametrize("names", ["all", ["all"], ["none"], None])
def test_a_word_for_several_places_passes_the_check(names: str | list[str] | None):
    check_integrations(names)


@pytest.mark.skipif("wandb" not in MISSING, reason="wandb is installed")
def test_a_place_whose_package_is_missing_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"requires wandb to be installed"):
        make_reporter(report_to="wandb")


@pytest.mark.skipif("tensorboard" in MISSING, reason="tensorboard is not installed")
def test_tensorboard_gets_metrics_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "log"))
    reporter = make_reporter(report_to="tensorboard", kl_coef=0.3, hub_token=TOKEN)
    run(reporter, 4)
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    logged = [(each.step, each.value) for each in events.Scalars("train/objective/kl")]
    assert logged == [(step, pytest.approx(step / 10)) for step in (1, 2, 3, 4)]
    args = events.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(args)["kl_coef"] == 0.3
    assert TOKEN not in args


@pytest.mark.skipif("tensorboard" in MISSING, reason="tensorboard is not installed")
def test_other_processes_write_nothing(tmp_path: Path):
    run(make_reporter(report_to="tensorboard", is_main=False, output_dir=str(tmp_path)), 2)
    assert list(tmp_path.iterdir()) == []


def test_mlflow_gets_metrics_and_settings(mlflow_client):
    reporter = make_reporter(report_to="mlflow", run_name="seven", kl_coef=0.3, hub_token=TOKEN)
    run(reporter, 4)
    (logged,) = mlflow_client.search_runs(["0"])
    history = mlflow_client.get_metric_history(logged.info.run_id, "objective/kl")
    assert sorted((each.step, each.value) for each in history) == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
    ]
    assert logged.info.run_name == "seven"
    assert logged.info.status == "FINISHED"
    assert logged.data.params["kl_coef"] == "0.3"
    assert logged.data.params["lam"] == "0.95"
    assert "hub_token" not in logged.data.params
    assert TOKEN not in str(logged.to_dictionary())
