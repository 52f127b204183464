"""Damaged metrics, damaged checkpoints and full disks: repaired, passed over, or said by name."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pipeline.inputs.json_lines import write_jsonl
from pipeline.launch.launcher import _MetricsFollower
from pipeline.results.report_files import write_report
from pipeline.tracking.journal import Journal
from ppo_core.__main__ import main
from ppo_core.checkpointing.lease import LEASE, Lease
from ppo_core.checkpointing.read_checkpoint import read_newest
from ppo_core.checkpointing.state_form import FORMS
from ppo_core.data.model_files import save_tokenizer
from ppo_core.errors import ConfigError, PPOError, TrainingError
from ppo_core.reporting.metrics_file import METRICS_FILE, MetricsFile, read_metrics
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training import train_reward_model, train_sft
from tests.helpers.inputs.sample_reports import summary
from tests.helpers.models.tiny import make_tokenizer
from tests.helpers.servers.full_disk import full_disk
from tests.ppo_core.checkpointing.test_recovery import vouch_for
from tests.ppo_core.training.test_trainer import CONFIG, make_trainer

UPDATES = 4


def trainer_in(folder: Path, **changes: Any):
    size = CONFIG.batch_size
    settings = {
        "total_episodes": UPDATES * size,
        "save_strategy": "steps",
        "save_steps": 2,
        "kl_target": 1.0,
        "output_dir": str(folder),
        **changes,
    }
    return make_trainer(dataclasses.replace(CONFIG, **settings))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of four updates with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    trainer_in(folder).train()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


# --- The metrics file ----------------------------------------------------------


def lines(count: int) -> list[bytes]:
    return [b'{"update": %d, "objective/kl": %d.5}\n' % (n, n) for n in range(1, count + 1)]


def with_line(number: int, line: bytes) -> bytes:
    """Five lines, of which one is another."""
    found = lines(5)
    found[number - 1] = line
    return b"".join(found)


DAMAGED_METRICS = {
    "half a line at the end": b"".join(lines(5))[:-9],
    "half a line in the middle": with_line(2, b'{"update": 2, "objec\n'),
    "two lines joined": b"".join(lines(5)).replace(b".5}\n{", b".5}{", 1),
    "invalid UTF-8": with_line(3, b'{"update": 3, "a\xff\xfe": 1.0}\n'),
    "null bytes": with_line(2, b"\0" * 40 + b"\n"),
    "no JSON": with_line(1, b"update 1: kl 1.5\n"),
    "a list": with_line(2, b"[2, 1.0]\n"),
    "a number": with_line(2, b"2\n"),
    "no update": with_line(2, b'{"objective/kl": 1.0}\n'),
    "the update as text": with_line(2, b'{"update": "2", "objective/kl": 1.0}\n'),
    "the update as float": with_line(2, b'{"update": 2.0, "objective/kl": 1.0}\n'),
    "a negative update": with_line(2, b'{"update": -2, "objective/kl": 1.0}\n'),
    "a metric as text": with_line(2, b'{"update": 2, "objective/kl": "high"}\n'),
    "a metric as object": with_line(2, b'{"update": 2, "objective/kl": {"a": 1}}\n'),
    "an update without metrics": with_line(2, b'{"update": 2}\n'),
    "deep nesting": with_line(2, b'{"update": 2, "a": ' + b"[" * 9999 + b"]" * 9999 + b"}\n"),
    "a missing update": b"".join(lines(5)[:1] + lines(5)[2:]),
    "only later updates": b"".join(lines(9)[6:]),
    "an empty file": b"",
    "no file": None,
    "an update twice": b"".join(lines(5) + lines(2)),
    "updates out of order": b"".join(reversed(lines(5))),
    "empty lines": b"\n\n".join(lines(5)),
    "later updates": b"".join(lines(9)),
}


@pytest.mark.parametrize("damage", DAMAGED_METRICS)
def test_metrics_are_repaired_to_the_update_of_the_checkpoint(damage, tmp_path, caplog):
    content = DAMAGED_METRICS[damage]
    file = MetricsFile(tmp_path)
    if content is not None:
        file.path.write_bytes(content)
    file.cut_back(4, {n: {"objective/kl": n + 0.5} for n in range(1, 5)})
    assert file.path.read_bytes() == b"".join(lines(4))
    if damage not in ("updates out of order",):
        (message,) = caplog.messages
        assert f"'{file.path}' was cut back to update 4." in message


def test_the_log_says_what_was_dropped_and_what_is_missing(tmp_path, caplog):
    file = MetricsFile(tmp_path)
    file.path.write_bytes(b"".join(lines(1)) + b"{\n" + b"".join(lines(9)[4:]) + b'{"upd')
    file.cut_back(6, {2: {"objective/kl": 2.5}})
    (message,) = caplog.messages
    assert message.endswith(
        "cut back to update 6. dropped damaged lines: 2; dropped updates: 7-9; "
        "restored updates: 2; updates without metrics: 3-4."
    )
    assert [line["update"] for line in read_metrics(file.path)] == [1, 2, 5, 6]


def test_a_resumed_run_repairs_the_metrics_from_its_checkpoint(finished, run, caplog):
    shutil.rmtree(run / "checkpoint-4")
    whole = read_metrics(run / METRICS_FILE)
    damaged = (run / METRICS_FILE).read_bytes().splitlines(keepends=True)
    damaged[0] = damaged[0][:30] + b"\xff\n"
    (run / METRICS_FILE).write_bytes(b"".join(damaged))
    trainer_in(run).train(resume_from_checkpoint=True)
    repaired = read_metrics(run / METRICS_FILE)
    assert [line["update"] for line in repaired] == [1, 2, 3, 4]
    assert repaired[:2] == whole[:2]
    assert sum("was cut back to update 2" in message for message in caplog.messages) == 1


def test_the_launcher_reads_past_damaged_lines(tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(with_line(2, b"\xff{[\n"))
    seen = []
    follower = _MetricsFollower(tmp_path / METRICS_FILE, lambda update, _: seen.append(update))
    follower.read_new_lines()
    assert seen == [1, 3, 4, 5]


# --- Checkpoints whose JSON has another form -----------------------------------


def put(*keys: Any, value: Any) -> Callable[[Any], Any]:
    """Set the value at a path of keys."""

    def change(document: Any) -> Any:
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return document

    return change


def drop(*keys: Any) -> Callable[[Any], Any]:
    def change(document: Any) -> Any:
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return document

    return change


def become(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


NAN, DEEP = float("nan"), "[" * 2000 + "]" * 2000
STATE, PROCESS, MANIFEST = "trainer_state.json", "process-0.json", "manifest.json"

OTHER_FORMS: dict[str, tuple[str, Any]] = {
    "state a list": (STATE, become([])),
    "state null": (STATE, become(None)),
    "state a text": (STATE, become("state")),
    "state empty": (STATE, become({})),
    "state no JSON": (STATE, b"{"),
    "state no UTF-8": (STATE, b'{"step": "\xff"}'),
    "state nested": (STATE, DEEP.encode()),
    "identity nested": (
        STATE,
        put("identity", "settings", value=json.loads("[" * 500 + "]" * 500)),
    ),
    **{
        f"no {name}": (STATE, drop(name))
        for name in (
            "identity optimizer kept scheduler skipped_steps skipped_in_a_row pretraining groups "
            "run reporter processes step"
        ).split()
    },
    "identity a list": (STATE, put("identity", value=[])),
    "models a text": (STATE, put("identity", "models", value="llama")),
    "optimizer a text": (STATE, put("optimizer", value="AdamW")),
    "parameter groups an object": (STATE, put("optimizer", "groups", value={})),
    "learning rate a text": (STATE, put("optimizer", "groups", 0, "lr", value="1e-3")),
    "learning rate NaN": (STATE, put("optimizer", "groups", 0, "lr", value=NAN)),
    "learning rate of 400 digits": (STATE, put("optimizer", "groups", 0, "lr", value=10**400)),
    "betas infinite": (STATE, put("optimizer", "groups", 0, "betas", value=[0.9, float("inf")])),
    "kept a list": (STATE, put("kept", value=["exp_avg"])),
    "schedule a list": (STATE, put("scheduler", value=[3])),
    "step of the schedule a text": (STATE, put("scheduler", "last_epoch", value="3")),
    "processes 0 as text": (STATE, put("processes", value="1")),
    "skipped steps true": (STATE, put("skipped_steps", value=True)),
    "groups a text": (STATE, put("groups", value="generators")),
    "run a list": (STATE, put("run", value=[4, 32])),
    "no episodes": (STATE, drop("run", "episodes")),
    "updates negative": (STATE, put("run", "updates", value=-4)),
    "updates a float": (STATE, put("run", "updates", value=4.0)),
    "moments NaN": (STATE, put("run", "moments", "mean", value=NAN)),
    "KL coefficient NaN": (STATE, put("run", "adaptive_kl", "kl_coef", value=NAN)),
    "health a list": (STATE, put("run", "health", value=[])),
    "health counts texts": (STATE, put("run", "health", "in_a_row", value={"a": "b"})),
    "pending a list": (STATE, put("run", "pending", value=[1])),
    "history of texts": (STATE, put("reporter", "log_history", value=["update 1"])),
    "history without steps": (
        STATE,
        put("reporter", "log_history", value=[{"objective/kl": 1.0}]),
    ),
    "callbacks a list": (STATE, put("reporter", "stateful_callbacks", value=[])),
    "random state a list": (PROCESS, become([])),
    "random state without NumPy": (PROCESS, drop("numpy")),
    "random words texts": (PROCESS, put("python", 1, 0, value="x")),
    "config a list": ("config.json", become([])),
    "config no JSON": ("config.json", b"model"),
}


def write_form(folder: Path, name: str, change: Any) -> None:
    """Change a file of a checkpoint, and sign the checkpoint again."""
    path = folder / name
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    vouch_for(folder)


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_checkpoint_of_another_form_is_passed_over(form, run, caplog):
    name, change = OTHER_FORMS[form]
    write_form(run / "checkpoint-4", name, change)
    assert read_newest(run, forms=FORMS).folder == run / "checkpoint-2"
    (message,) = caplog.messages
    assert str(run / "checkpoint-4" / name) in message


MANIFESTS = {
    "a list": b"[]",
    "texts": b'{"files": ["trainer_state.json"]}',
    "one text": b'{"files": "trainer_state.json"}',
    "digests as texts": b'{"files": {"trainer_state.json": "abc"}}',
    "no files": b'{"files": {}}',
    "null": b"null",
    "NaN": b'{"files": {"trainer_state.json": {"bytes": NaN, "sha256": NaN}}}',
    "nested": DEEP.encode(),
    "no UTF-8": b"\xff",
    "empty": b"",
    "a name with null": b'{"files": {"trainer_state.json": {}, "a\\u0000b": {}}}',
    "a long name": b'{"files": {"trainer_state.json": {}, "%s": {}}}' % (b"a" * 5000),
}


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_of_another_form_is_passed_over(manifest, run, caplog):
    (run / "checkpoint-4" / MANIFEST).write_bytes(MANIFESTS[manifest])
    assert read_newest(run, forms=FORMS).folder == run / "checkpoint-2"
    assert str(run / "checkpoint-4") in caplog.messages[0]


def test_a_run_resumes_from_the_checkpoint_before_one_of_another_form(run, caplog):
    write_form(run / "checkpoint-4", STATE, drop("optimizer"))
    history = trainer_in(run).train(resume_from_checkpoint=True)
    assert len(history) == 2
    assert f"Skipping '{run / 'checkpoint-4'}'" in caplog.text


def test_tensors_that_do_not_fit_their_names_are_one_message(run):
    for step in (2, 4):
        write_form(
            run / f"checkpoint-{step}", STATE, put("kept", value={"critic.head.bias": ["exp_avg"]})
        )
    with pytest.raises(TrainingError, match="checkpoint-4'"):
        trainer_in(run).train(resume_from_checkpoint=True)


LEASES = {
    "a list": "[]",
    "token a text": '{"token": "2", "host": "a", "pid": 1, "started": "b"}',
    "no token": '{"host": "a", "pid": 1, "started": "b"}',
    "nested": DEEP,
    "empty": "",
}


@pytest.mark.parametrize("lease", LEASES)
def test_a_lease_of_another_form_is_named(lease, tmp_path):
    (tmp_path / LEASE).write_text(LEASES[lease])
    with pytest.raises(TrainingError, match=r"lease\.json' cannot be read.*remove the file"):
        Lease.claim(tmp_path)


# --- All checkpoints are damaged -----------------------------------------------


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


ALL_DAMAGED: dict[str, Callable[[Path], object]] = {
    "weights cut": cut_weights,
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "manifest a list": lambda folder: (folder / MANIFEST).write_text("[]"),
    "no state": lambda folder: (folder / STATE).unlink(),
    "state a list": lambda folder: write_form(folder, STATE, become([])),
    "empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("checkpoint")),
    "signed without its state": lambda folder: ((folder / STATE).unlink(), vouch_for(folder)),
}


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("checkpoint-*/*")}


@pytest.mark.parametrize("damage", ALL_DAMAGED)
def test_no_run_starts_anew_over_damaged_checkpoints(damage, run):
    for step in (2, 4):
        ALL_DAMAGED[damage](run / f"checkpoint-{step}")
    before = content_of(run)
    with pytest.raises(TrainingError, match=r"All checkpoints in .* are damaged") as refused:
        trainer_in(run).train(resume_from_checkpoint=True)
    assert all(str(run / f"checkpoint-{step}") in str(refused.value) for step in (2, 4))
    with pytest.raises(ConfigError, match="belongs to an earlier run"):
        trainer_in(run).train()
    assert content_of(run) == before


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    """Flags of `python -m ppo_core` for a tiny run, without its output folder."""
    folder = tmp_path_factory.mktemp("job")
    trainer_parts = make_trainer()
    trainer_parts.policy.model.save_pretrained(folder / "policy")
    make_tokenizer().save_pretrained(folder / "policy")
    (folder / "prompts.jsonl").write_text('{"prompt": "w1 w2"}\n{"prompt": "w3"}\n' * 8)
    return (
        f"--dataset_name {folder / 'prompts.jsonl'} --model_name_or_path {folder / 'policy'} "
        "--per_device_train_batch_size 4 --batch_size 8 --total_episodes 8 --response_length 4 "
        "--save_steps 1 --num_sample_generations 0 --disable_tqdm true --use_cpu true "
        "--resume_from_checkpoint latest"
    ).split()


def test_the_command_says_so_with_exit_code_1(job, tmp_path, capsys):
    (tmp_path / "checkpoint-1").mkdir()
    assert main([*job, "--output_dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "All checkpoints in" in said and "Traceback" not in said
    assert not (tmp_path / "model.safetensors").exists()


# --- Full disks ----------------------------------------------------------------

WEIGHTS = 20_000
"""Bytes that a file may have: less than the weights of the tiny policy."""


def write_checkpoint(folder: Path) -> None:
    trainer_in(folder).train()


def write_metrics(folder: Path) -> None:
    file = MetricsFile(folder)
    for update in range(1, 10_000):
        file.append(update, {"objective/kl": 1.0})


def write_lines_anew(folder: Path) -> None:
    MetricsFile(folder).cut_back(10_000, {n: {"objective/kl": 1.0} for n in range(1, 10_000)})


def write_export(folder: Path) -> None:
    trainer_in(folder, save_strategy="no").save_model(folder / "policy")


def write_sft(folder: Path) -> None:
    rows = [{"prompt": "w1", "completion": "w2 w3"}] * 4
    train_sft(str(folder / "start"), rows, SupervisedConfig(max_length=16), folder / "sft")


def write_reward_model(folder: Path) -> None:
    rows = [{"prompt": "w1", "chosen": "w2 w3", "rejected": "w4"}] * 4
    config = SupervisedConfig(max_length=16)
    train_reward_model(str(folder / "start"), rows, config, folder / "reward")


def write_journal(folder: Path) -> None:
    journal = Journal(folder / "journal")
    for step in range(10_000):
        journal.log_metrics("r", {"loss": 1.0}, step)


def write_artifact(folder: Path) -> None:
    Journal(folder / "journal").write_file("r", "page.html", b"x" * WEIGHTS * 2)


def write_summary(folder: Path) -> None:
    write_report(folder / "summary.json", summary(warnings=["x" * WEIGHTS * 2]))


def write_judgements(folder: Path) -> None:
    write_jsonl(folder / "judgements.jsonl", [{"reply": "x" * WEIGHTS * 2}])


FULL: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "checkpoint": (write_checkpoint, "checkpoint-2", "checkpoint-*"),
    "metrics": (write_metrics, METRICS_FILE, "nothing"),
    "metrics on resuming": (write_lines_anew, METRICS_FILE, METRICS_FILE),
    "policy": (write_export, "policy", "policy/*"),
    "SFT model": (write_sft, "sft", "sft/*model*"),
    "reward model": (write_reward_model, "reward", "reward/*model*"),
    "journal": (write_journal, "journal.jsonl", "nothing"),
    "artifact of the journal": (write_artifact, "page.html", "journal/files/r/*"),
    "summary": (write_summary, "summary.json", "summary.json"),
    "judgements": (write_judgements, "judgements.jsonl", "nothing"),
}
"""By what is written: the work, the path to name, and the files that must not be left."""


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_reported_by_its_path_and_leaves_nothing_half_written(what, tmp_path):
    work, named, pattern = FULL[what]
    start = make_trainer().policy.model
    start.save_pretrained(tmp_path / "start")
    make_tokenizer().save_pretrained(tmp_path / "start")
    with full_disk(WEIGHTS), pytest.raises(PPOError) as refused:
        work(tmp_path)
    assert str(tmp_path) in str(refused.value) and named in str(refused.value)
    assert not list(tmp_path.glob(pattern))
    assert not list(tmp_path.rglob("*partial*")) + list(tmp_path.rglob(".*unfinished*"))


def test_a_tokenizer_without_room_is_named(tmp_path):
    with full_disk(50), pytest.raises(OSError, match=str(tmp_path)):
        save_tokenizer(make_tokenizer(), tmp_path)


def test_an_export_without_room_keeps_the_earlier_policy(tmp_path):
    trainer = trainer_in(tmp_path, save_strategy="no")
    trainer.save_model(tmp_path / "policy")
    before = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    with full_disk(WEIGHTS), pytest.raises(TrainingError, match="cannot be written"):
        trainer.save_model(tmp_path / "policy")
    after = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    assert after == before
    AutoModelForCausalLM.from_pretrained(tmp_path / "policy")


def test_the_command_on_a_full_disk_ends_with_exit_code_1(job, tmp_path, capsys):
    with full_disk(WEIGHTS):
        assert main([*job, "--output_dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path) in said and "Traceback" not in said
    assert not list(tmp_path.glob("*.safetensors"))
