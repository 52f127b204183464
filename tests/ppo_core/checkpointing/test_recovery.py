"""A run resumes bit for bit after any interruption, or is refused with a reason."""

import dataclasses
import errno
import hashlib
import json
import logging
import random
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import TrainerCallback

from ppo_core.checkpointing.checkpointer import AsyncWriter, Checkpointer, SavePlan
from ppo_core.checkpointing.folders import STATE
from ppo_core.checkpointing.lease import Lease
from ppo_core.checkpointing.ppo_checkpoint import CheckpointContents
from ppo_core.checkpointing.read_checkpoint import ANY_FORM, read_newest
from ppo_core.checkpointing.write_checkpoint import Part
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.models.reward_model import RewardModel
from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.helpers.runs.forked_python import run_python
from tests.helpers.slow_cases import slow
from tests.ppo_core.training.test_export import LONG, StopAfter, without_clocks
from tests.ppo_core.training.test_trainer import make_trainer

ALL_OF_IT = dataclasses.replace(
    LONG, total_episodes=32, batch_size=8, num_ppo_epochs=1, ptx_coef=0.1, kl_horizon=200
)
"""Settings that use everything that a checkpoint holds."""

TEXTS = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10 w11 w12", "w13 w14"]


def noisy_length(prompts, responses):
    """A reward that draws from all global random generators."""
    noise = random.random() + np.random.rand() + torch.rand(1).item()
    return [len(response) / 10 + noise for response in responses]


def trainer_in(folder: Path, config=ALL_OF_IT, **changes):
    config = dataclasses.replace(config, output_dir=str(folder))
    parts = {"reward_model": noisy_length, "pretrain_dataset": TEXTS, **changes}
    return make_trainer(config, **parts)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def outcome(trainer) -> str:
    """Return a digest of weights, moments, averaged weights, updates and metrics."""
    train_state = trainer._train_state
    state = train_state.optimizer.state
    tensors = [
        *train_state.module.state_dict().values(),
        *(
            state[p][k]
            for p in train_state.module.parameters()
            if p in state
            for k in sorted(state[p])
        ),
        *trainer.reference.parameters(),
        *(trainer._average.tensors().values() if trainer._average else ()),
        torch.get_rng_state(),
    ]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    metrics = without_clocks(trainer.state.log_history)
    digest.update(repr((trainer._run.updates, metrics)).encode())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> SimpleNamespace:
    """The checkpoints of an uninterrupted run, of a stopped one, and of one before its start."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("whole", "stopped", "fresh")}

    def start(name, **changes):
        seed_everything(5)
        trainer = trainer_in(folders[name], **changes)
        trainer._train_state.skipped_steps = 1
        return trainer

    whole = start("whole")
    whole.train()
    of_whole = outcome(whole)
    start("stopped", callbacks=[StopAfter(2)]).train()
    seed_everything(17)
    fresh = trainer_in(folders["fresh"])
    fresh._checkpoints.start(None)
    fresh._checkpoints.save()
    return SimpleNamespace(outcome=of_whole, **folders)


def resume(folder: Path, **changes):
    seed_everything(99)
    trainer = trainer_in(folder, **changes)
    trainer.train(resume_from_checkpoint=True)
    return trainer


# --- Every saved state is needed ------------------------------------


def vouch_for(folder: Path) -> None:
    """Write a manifest for the present content of the folder."""
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def start_file_anew(name):
    def leave_out(folder: Path, fresh: Path) -> None:
        shutil.copyfile(fresh / name, folder / name)

    return leave_out


def start_tensor_anew(file, name):
    def leave_out(folder: Path, fresh: Path) -> None:
        tensors = load_file(folder / file)
        save_file(tensors | {name: load_file(fresh / file)[name]}, folder / file)

    return leave_out


def start_entry_anew(file, *keys):
    def leave_out(folder: Path, fresh: Path) -> None:
        document, of_fresh = (json.loads((f / file).read_text()) for f in (folder, fresh))
        inner, inner_fresh = document, of_fresh
        for key in keys[:-1]:
            inner, inner_fresh = inner[key], inner_fresh[key]
        inner[keys[-1]] = inner_fresh[keys[-1]]
        (folder / file).write_text(json.dumps(document))

    return leave_out


def forget_moments(folder: Path, fresh: Path) -> None:
    start_file_anew("optimizer-0.safetensors")(folder, fresh)
    start_entry_anew(STATE, "kept")(folder, fresh)


LEFT_OUT = {
    "policy": start_file_anew("model.safetensors"),
    "critic": start_file_anew("critic.safetensors"),
    "moments of Adam": forget_moments,
    "learning rates": start_entry_anew(STATE, "optimizer", "groups"),
    "schedule": start_entry_anew(STATE, "scheduler"),
    "running mean of the weights": start_file_anew("average.safetensors"),
    "refreshed reference": start_file_anew("reference.safetensors"),
    "sampling": start_tensor_anew("generators.safetensors", "sampling"),
    "shuffling": start_tensor_anew("generators.safetensors", "shuffling"),
    "torch": start_tensor_anew("process-0.safetensors", "torch"),
    "NumPy": start_tensor_anew("process-0.safetensors", "numpy"),
    "Python": start_entry_anew("process-0.json", "python"),
    "KL controller": start_entry_anew(STATE, "run", "adaptive_kl"),
    "running moments of the scores": start_entry_anew(STATE, "run", "moments"),
    "position in the prompts": start_entry_anew(STATE, "run", "episodes"),
    "updates made": start_entry_anew(STATE, "run", "updates"),
    "texts not to forget": start_entry_anew(STATE, "pretraining"),
    "skipped steps": start_entry_anew(STATE, "skipped_steps"),
    "history": start_entry_anew(STATE, "reporter"),
}


def test_a_resumed_run_is_the_run_that_was_not_interrupted(runs, tmp_path):
    shutil.copytree(runs.stopped, tmp_path, dirs_exist_ok=True)
    assert outcome(resume(tmp_path)) == runs.outcome


QUICK, LATER = [*LEFT_OUT][:4], [*LEFT_OUT][4:]


@pytest.mark.parametrize("left_out", [*QUICK, *slow(*LATER)])
def test_each_saved_state_is_needed(left_out, runs, tmp_path):
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(runs.stopped / "checkpoint-2", folder)
    LEFT_OUT[left_out](folder, runs.fresh / "checkpoint-0")
    vouch_for(folder)
    assert outcome(resume(tmp_path)) != runs.outcome


def as_an_earlier_version_wrote(folder: Path) -> None:
    """Name the critic's backbone critic.backbone.*, and leave out the digest of the texts."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        save_file(
            {k.replace("critic.model.", "critic.backbone."): t for k, t in tensors.items()}, path
        )
    state = (folder / STATE).read_text()
    assert '"critic.model.' in state
    earlier = json.loads(state.replace('"critic.model.', '"critic.backbone.'))
    del earlier["identity"]["settings"]["pretrain_dataset"]
    (folder / STATE).write_text(json.dumps(earlier))
    vouch_for(folder)


def test_a_checkpoint_of_an_earlier_version_is_resumed_to_the_bit(runs, tmp_path):
    shutil.copytree(runs.stopped, tmp_path, dirs_exist_ok=True)
    as_an_earlier_version_wrote(tmp_path / "checkpoint-2")
    assert any(
        "critic.backbone." in n for n in load_file(tmp_path / "checkpoint-2" / "critic.safetensors")
    )
    assert outcome(resume(tmp_path)) == runs.outcome


def test_nothing_in_a_checkpoint_is_a_pickle(runs):
    suffixes = {path.suffix for path in (runs.whole / "checkpoint-4").iterdir()}
    assert suffixes <= {".json", ".safetensors", ".jinja"}


# --- Damage --------------------------------------------------------------------


def test_no_file_of_a_checkpoint_can_be_damaged_unseen(runs, tmp_path, caplog):
    tried = 0
    files = sorted(path.name for path in (runs.whole / "checkpoint-4").iterdir())
    assert {"model.safetensors", "optimizer-0.safetensors", "process-0.json"} <= set(files)
    for name in files:
        content = (runs.whole / "checkpoint-4" / name).read_bytes()
        other = (runs.whole / "checkpoint-2" / name).read_bytes()
        flipped = bytes([content[-3] ^ 4])
        for damaged in (content[:-1], content[:-3] + flipped + content[-2:], None, other):
            if damaged == content:
                continue  # equal in every step, as the configuration is
            folder = tmp_path / f"{tried}"
            shutil.copytree(runs.whole, folder)
            if damaged is None:
                (folder / "checkpoint-4" / name).unlink()
            else:
                (folder / "checkpoint-4" / name).write_bytes(damaged)
            assert read_newest(folder).folder == folder / "checkpoint-2", name
            assert "checkpoint-4' and trying the previous one" in caplog.messages[-1]
            tried += 1
    assert tried >= 4 * len(files) - 6


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(runs, tmp_path, caplog):
    shutil.copytree(runs.whole, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoint-4" / "critic.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    assert outcome(resume(tmp_path)) == runs.outcome
    first, second, third = (text for text in caplog.messages[-4:] if "What was wrong" not in text)
    assert "critic.safetensors' has changed since it was written" in first
    assert second.startswith("Resumed from") and "checkpoint-2: 2 updates are done" in second
    assert third.endswith("was cut back to update 2. dropped updates: 3-4.")
    # The damaged checkpoint was written again.
    assert read_newest(tmp_path).state["step"] == 4


def test_a_damaged_checkpoint_that_was_named_is_refused(runs, tmp_path):
    shutil.copytree(runs.whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-4" / "critic.safetensors").unlink()
    with pytest.raises(TrainingError, match=r"critic\.safetensors' is missing"):
        trainer_in(tmp_path).train(resume_from_checkpoint=tmp_path / "checkpoint-4")


# --- Another run ---------------------------------------------------------------


def test_every_difference_is_named_and_can_be_overruled(runs, tmp_path, caplog):
    shutil.copytree(runs.stopped, tmp_path, dirs_exist_ok=True)
    other = dataclasses.replace(ALL_OF_IT, cliprange=0.3, learning_rate=5e-4)
    words = (
        r"was written with learning_rate=0\.001, which is now 0\.0005; "
        r"written with cliprange=0\.2, which is now 0\.3\. .*--resume_anyway"
    )
    with pytest.raises(TrainingError, match=words):
        trainer_in(tmp_path, other).train(resume_from_checkpoint=True)
    trainer = trainer_in(tmp_path, other)
    history = trainer.train(resume_from_checkpoint=True, resume_anyway=True)
    # Half of a linear schedule with the new rate has passed.
    assert [metrics["lr"] for metrics in history] == pytest.approx([2.5e-4, 1.25e-4])
    assert [text for text in caplog.messages if "Resuming anyway" in text and "cliprange" in text]


def test_the_settings_that_need_less_memory_may_change(runs, tmp_path):
    """PPO's advice after out-of-memory."""
    shutil.copytree(runs.stopped, tmp_path, dirs_exist_ok=True)
    smaller = dataclasses.replace(
        ALL_OF_IT,
        per_device_train_batch_size=2,
        max_tokens_per_microbatch=40,
        gradient_checkpointing=True,
    )
    trainer = trainer_in(tmp_path, smaller)
    trainer.train(resume_from_checkpoint=True)
    whole, resumed = (read_newest(one).tensors("critic") for one in (runs.whole, tmp_path))
    assert_close(dict(resumed), dict(whole), rtol=1e-4, atol=1e-5)
    # Without `batch_size`, a smaller batch of a process is another batch of the run.
    other = dataclasses.replace(smaller, batch_size=None)
    with pytest.raises(TrainingError, match="written with batch_size=8, which is now 2"):
        trainer_in(tmp_path, other).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_other_pretraining_texts_is_refused(runs, tmp_path):
    shutil.copytree(runs.stopped, tmp_path, dirs_exist_ok=True)
    with pytest.raises(TrainingError, match="written with pretrain_dataset="):
        resume(tmp_path, pretrain_dataset=[*TEXTS[:-1], "w13 w15"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ref_model": make_policy(seed=7)}, "another reference: .* entries differ, the first"),
        (
            {"reward_model": (make_classifier(seed=7), {})},
            "another reward model 0: .* differ, the first",
        ),
        (
            {"reward_model": (make_classifier(), {"gain": 2.0})},
            r"another reward model 0: 1 entries differ, the first of them gain, which was 1\.0 and",
        ),
        ({"model": make_policy("gpt2"), "ref_model": make_policy("gpt2")}, "another policy or"),
    ],
    ids=["reference", "reward", "how the reward is read", "architecture"],
)
def test_a_checkpoint_of_other_models_is_refused(changes, words, tmp_path):
    config = dataclasses.replace(ALL_OF_IT, ptx_coef=0.0)
    reward = RewardModel(make_classifier(), make_tokenizer())
    parts = {"reward_model": reward, "pretrain_dataset": None}
    trainer_in(tmp_path, config, callbacks=[StopAfter(2)], **parts).train()
    if isinstance(other := changes.get("reward_model"), tuple):
        changes = {"reward_model": RewardModel(other[0], make_tokenizer(), **other[1])}
    with pytest.raises(TrainingError, match=words):
        trainer_in(tmp_path, config, **{**parts, **changes}).train(resume_from_checkpoint=True)


LORA = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4), "ref_model": None}


def test_a_run_with_an_adapter_is_resumed_to_the_bit_on_its_own_base(tmp_path):
    config = dataclasses.replace(ALL_OF_IT, reference_refresh_updates=0)
    seed_everything(5)
    whole = trainer_in(tmp_path / "whole", config, **LORA)
    whole.train()
    expected = outcome(whole)
    seed_everything(5)
    stopped = tmp_path / "stopped"
    trainer_in(stopped, config, callbacks=[StopAfter(2)], **LORA).train()
    assert outcome(resume(stopped, config=config, **LORA)) == expected
    louder = {**LORA, "peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16)}
    words = (
        "another adapter: 1 entries differ, the first of them lora_alpha, which was 8 and is now 16"
    )
    with pytest.raises(TrainingError, match=words):
        resume(stopped, config=config, **louder)
    with pytest.raises(TrainingError, match="another policy: "):
        resume(stopped, config=config, model=make_policy(seed=7), **LORA)


def test_a_checkpoint_is_written_after_all_random_draws_of_its_update(tmp_path):
    # The samples that are shown are scored too, and this reward draws random numbers.
    config = dataclasses.replace(ALL_OF_IT, num_sample_generations=4)
    shown = {"config": config, "eval_dataset": TEXTS}
    seed_everything(5)
    whole = trainer_in(tmp_path / "whole", **shown)
    whole.train()
    seed_everything(5)
    stopped = tmp_path / "stopped"
    trainer_in(stopped, callbacks=[StopAfter(2)], **shown).train()
    assert outcome(resume(stopped, **shown)) == outcome(whole)


def test_pretraining_texts_that_the_checkpoint_lacks_can_be_added_anyway(tmp_path):
    without = dataclasses.replace(ALL_OF_IT, ptx_coef=0.0)
    stop = [StopAfter(2)]
    trainer_in(tmp_path, without, pretrain_dataset=None, callbacks=stop).train()
    trainer = trainer_in(tmp_path)
    assert len(trainer.train(resume_from_checkpoint=True, resume_anyway=True)) == 2


# --- Writing while training continues ----------------------------------------


def test_checkpoints_written_in_the_background_are_the_same(runs, tmp_path):
    background = dataclasses.replace(ALL_OF_IT, async_save=True)
    seed_everything(5)
    trainer = trainer_in(tmp_path, background)
    trainer._train_state.skipped_steps = 1
    trainer.train()
    assert outcome(trainer) == runs.outcome
    for step in (2, 4):
        ours, theirs = (folder / f"checkpoint-{step}" for folder in (tmp_path, runs.whole))
        for path in theirs.glob("*.safetensors"):
            assert path.read_bytes() == (ours / path.name).read_bytes(), path.name


def test_training_waits_for_the_previous_checkpoint_only():
    saver, may_write, written = AsyncWriter(in_background=True), threading.Event(), []

    def write() -> None:
        may_write.wait(60)
        written.append(len(written))

    saver.save(write)
    assert written == []
    may_write.set()
    saver.save(write)
    assert written[:1] == [0]
    saver.wait()
    assert written == [0, 1]


def test_the_state_is_copied_after_the_previous_copy_was_written(tmp_path):
    events = []

    class Contents:
        step = 1

        def part(self) -> Part:
            events.append("copied")
            return Part(documents={STATE: "{}"}, write_policy=write_slowly)

    def write_slowly(folder: Path) -> None:
        time.sleep(0.05)
        events.append("written")

    plan = SavePlan(folder=tmp_path, saves=True, keep=None, in_background=True, timeout=60)
    checkpoints = Checkpointer(Contents(), plan, ANY_FORM)
    checkpoints.start(None)
    checkpoints.save()
    checkpoints.save()
    checkpoints.finish()
    assert events == ["copied", "written"] * 2


def test_a_callback_may_read_the_checkpoint_that_is_written_in_the_background(tmp_path):
    class Reader(TrainerCallback):
        def on_save(self, args, state, control, **details) -> None:
            found.append(Path(args.output_dir, f"checkpoint-{state.global_step}", STATE).is_file())

    found: list[bool] = []
    background = dataclasses.replace(ALL_OF_IT, async_save=True)
    trainer_in(tmp_path, background, callbacks=[Reader()]).train()
    assert found and all(found)


def test_a_run_resumes_with_all_that_was_logged(tmp_path):
    trainer = trainer_in(tmp_path, callbacks=[StopAfter(2)])
    trainer._reporter.log({"passed": True, "phase": "warm-up", "lengths": [1, 2]})
    trainer.train()
    again = trainer_in(tmp_path)
    again.train(resume_from_checkpoint=True)
    logged = {"passed": True, "phase": "warm-up", "lengths": [1, 2], "epoch": 0, "step": 0}
    assert again.state.log_history[0] == logged


def test_an_error_in_the_background_is_raised_once(tmp_path, monkeypatch):
    def fill_up(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = trainer_in(tmp_path, dataclasses.replace(ALL_OF_IT, async_save=True))
    monkeypatch.setattr(CheckpointContents, "_policy_writer", lambda _: fill_up)
    with pytest.raises(TrainingError, match=r"step 2 could not be written.*No space left"):
        trainer.train()
    trainer._checkpoints.finish()
    assert read_newest(tmp_path) is None


# --- Who may write -------------------------------------------------------------


class TakenOverAfter(TrainerCallback):
    def __init__(self, updates):
        self.updates = updates

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.updates:
            self.lease = Lease.claim(Path(args.output_dir))


def test_a_run_that_was_taken_over_stops_and_writes_no_more(tmp_path):
    # The claim comes before the metrics and the checkpoint of update 4.
    other = TakenOverAfter(3)
    with pytest.raises(TrainingError, match="took over"):
        trainer_in(tmp_path, callbacks=[other]).train()
    assert other.lease.token == 2
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert [line["update"] for line in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3]


class SaveOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save |= state.global_step == 1


def test_a_checkpoint_that_a_callback_asks_for_needs_the_lease_too(tmp_path):
    silent = dataclasses.replace(ALL_OF_IT, save_strategy="no")
    trainer_in(tmp_path, silent, callbacks=[SaveOnce()]).train()
    assert Lease.claim(tmp_path).token == 2
    assert read_newest(tmp_path).folder == tmp_path / "checkpoint-1"


def test_at_least_two_checkpoints_are_kept():
    with pytest.raises(ConfigError, match=r"save_total_limit=1 would keep only one.*at least 2"):
        dataclasses.replace(ALL_OF_IT, save_total_limit=1)


def test_a_resumed_run_logs_it(runs, tmp_path, caplog):
    shutil.copytree(runs.whole, tmp_path, dirs_exist_ok=True)
    caplog.set_level(logging.WARNING)
    assert trainer_in(tmp_path).train(resume_from_checkpoint=True) == []
    assert f"Resumed from {tmp_path / 'checkpoint-4'}: 4 updates are done." in caplog.messages


# --- Several processes ---------------------------------------------------------


@pytest.mark.parametrize(
    "sharding",
    [
        "ddp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero2", "zero3", "fsdp2")),
    ],
)
def test_a_run_resumes_with_another_number_of_processes(sharding, tmp_path):
    # Imported here, because recovery_job imports this file.
    from tests.helpers.jobs.recovery_job import trainer_of, weights_and_moments

    whole = trainer_of(tmp_path / "whole", "none")
    history = whole.train()
    trainer_of(tmp_path / "begun", "none", callbacks=[StopAfter(1)]).train()
    ran = run_python(
        *("-m", "tests.helpers.jobs.recovery_job", tmp_path, sharding),
        variables={"CUDA_VISIBLE_DEVICES": ""},
        processes=2,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    left = sorted(path.name for path in (tmp_path / "left" / "checkpoint-3").glob("optimizer*"))
    assert left == ["optimizer-0.safetensors", "optimizer-1.safetensors"]
    ended = trainer_of(tmp_path / "left", "none")
    last = ended.train(resume_from_checkpoint=True)

    metrics = [*json.loads((tmp_path / "ended.json").read_text()), *last]
    for actual, expected in zip(metrics, [*history[1:], history[3]], strict=True):
        assert actual["objective/scores"] == pytest.approx(expected["objective/scores"], abs=1e-6)
        assert actual["loss/policy_avg"] == pytest.approx(expected["loss/policy_avg"], abs=1e-5)
    for found in (load_file(tmp_path / "ended.st"), weights_and_moments(ended)):
        for name, tensor in weights_and_moments(whole).items():
            assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)


# --- A pause -------------------------------------------------------------------


def test_a_paused_run_ends_as_one_that_did_not_pause(runs, tmp_path):
    seed_everything(5)
    paused = trainer_in(tmp_path)
    paused._train_state.skipped_steps = 1
    assert len(paused.train(stop_after_updates=2)) == 2
    assert paused.is_done
    assert (tmp_path / "checkpoint-2").is_dir()
    # At the pause, nothing is left to do.
    assert trainer_in(tmp_path).train(True, stop_after_updates=2) == []
    again = trainer_in(tmp_path)
    again.train(True)
    assert outcome(again) == runs.outcome


def test_after_a_pause_another_reward_continues_state_and_learning_rate(tmp_path):
    def model(seed: int) -> RewardModel:
        return RewardModel(make_classifier(seed=seed), make_tokenizer())

    whole = trainer_in(tmp_path / "whole", reward_model=model(1)).train()
    trainer_in(tmp_path / "run", reward_model=model(1)).train(stop_after_updates=2)
    with pytest.raises(TrainingError, match="written with another reward model 0"):
        trainer_in(tmp_path / "run", reward_model=model(2)).train(True)
    changed = trainer_in(tmp_path / "run", reward_model=model(2))
    later = changed.train(True, resume_anyway=True)
    assert [each["episode"] for each in later] == [24, 32]
    # Policy, reference, prompts and random numbers are those of the whole run, but not the scores.
    for name in ("objective/kl", "objective/entropy", "lr"):
        assert later[0][name] == whole[2][name]
    assert later[0]["objective/scores"] != whole[2]["objective/scores"]


@pytest.mark.parametrize("updates", [0, -1])
def test_a_pause_before_the_first_update_is_refused(tmp_path, updates):
    with pytest.raises(ConfigError, match=f"stop_after_updates={updates} must be at least 1"):
        trainer_in(tmp_path).train(stop_after_updates=updates)


def test_a_pause_without_checkpoints_is_refused(tmp_path):
    config = dataclasses.replace(ALL_OF_IT, save_strategy="no")
    with pytest.raises(ConfigError, match="stop_after_updates=2 needs a checkpoint"):
        trainer_in(tmp_path, config).train(stop_after_updates=2)
