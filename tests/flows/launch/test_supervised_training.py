"""SFT and reward-model training, killed, stopped and frozen for real, in processes of their own."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.launch.supervised_training import Training, supervised_job, train_supervised
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import SupervisedSection
from ppo_core.data.rows.read_rows import read_source
from ppo_core.data.sources.source import source_of_rows
from ppo_core.errors import ConfigError, ProcessError, RunInterruptedError
from ppo_core.supervised.job import read_result
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_policy

ROWS = {
    "sft": [{"prompt": f"w{n}", "completion": " ".join(["w1"] * (1 + n % 6))} for n in range(60)],
    "reward": [
        {"prompt": f"w{n}", "chosen": "w1 w2", "rejected": " ".join(["w3"] * (1 + n % 4))}
        for n in range(60)
    ],
}
KINDS = {"sft": "demonstrations", "reward": "pairs"}
SECTION = SupervisedSection(
    learning_rate=1e-2, batch_size=2, num_epochs=2, max_length=64, save_steps=7.0
)
STEPS = 60

Start = Callable[..., Mapping[str, float]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_policy().save_pretrained(folder)
    make_chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start(base: Path) -> Start:
    """Return a function that trains in a folder, and calls `then` at the line of a step."""

    def run(
        training: Training,
        folder: Path,
        then: Callable[[], None] = lambda: None,
        *,
        at: int = STEPS + 1,
        section: SupervisedSection = SECTION,
        **changes: Any,
    ) -> Mapping[str, float]:
        rows = read_source(source_of_rows(ROWS[training]), KINDS[training], is_chat=True)
        given = replace(settings(), **{"processes": 1, **changes})
        train_supervised(
            supervised_job(training, str(base), section, given, folder / "model"),
            rows,
            given,
            folder=folder / "job",
            on_metrics=lambda step, metrics: then() if step == at else None,
        )
        return read_result(folder / "job")

    return run


def settings() -> Settings:
    return make_settings({}, {"policy": "p", "preferences": "a", "prompts": "b"})


def processes() -> list[psutil.Process]:
    """The training processes that this test has started."""
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if "ppo_core.supervised" in each.cmdline()
        and "ppo_core.distributed.torchrun" not in each.cmdline()
    ]


def left_behind(folder: Path) -> dict[str, Any]:
    """The bytes of the trained model and its last checkpoint, and the lines of the metrics."""
    last = folder / "job" / "checkpoint-56"
    files = [
        *(folder / "model").iterdir(),
        *last.glob("*.safetensors"),
        last / "trainer_state.json",
    ]
    lines = (folder / "job" / "metrics.jsonl").read_text().splitlines()
    return {file.name: file.read_bytes() for file in files} | {"metrics": lines}


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = {}
    for training in ROWS:
        folder = tmp_path_factory.mktemp(training)
        metrics = start(training, folder)
        assert metrics["steps"] == STEPS
        made[training] = left_behind(folder)
        assert len(made[training]["metrics"]) == STEPS
    return made


def kill() -> None:
    for process in processes():
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("training", ROWS)
@pytest.mark.parametrize("seed", range(5))
def test_a_training_that_is_killed_ends_as_one_that_is_not(
    start: Start, undisturbed: dict[str, Any], tmp_path: Path, training: Training, seed: int
):
    chance = random.Random(seed)
    step, delay = chance.randrange(1, STEPS), chance.uniform(0, 0.05)

    def kill_soon() -> None:
        threading.Timer(delay, kill).start()

    with pytest.raises(ProcessError, match="was ended by SIGKILL"):
        start(training, tmp_path, kill_soon, at=step)
    start(training, tmp_path)
    assert left_behind(tmp_path) == undisturbed[training], (step, delay)


@pytest.mark.slow
def test_sigterm_saves_and_the_next_attempt_resumes(
    start: Start, undisturbed: dict[str, Any], tmp_path: Path
):
    with pytest.raises(RunInterruptedError, match="The training stopped after SIGTERM"):
        start("reward", tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM), at=10)
    folders = (tmp_path / "job").glob("checkpoint-*")
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in folders]
    assert max(state["step"] for state in states) >= 10
    assert not any((tmp_path / "model").iterdir())
    start("reward", tmp_path)
    assert left_behind(tmp_path) == undisturbed["reward"]


@pytest.mark.slow
def test_a_frozen_process_is_ended_and_the_next_attempt_resumes(start: Start, tmp_path: Path):
    section = replace(SECTION, num_epochs=20)
    frozen = []

    def freeze() -> None:
        processes()[1].suspend()
        frozen.append(time.monotonic())

    with pytest.raises(ProcessError, match=r"of the training was frozen"):
        start("sft", tmp_path, freeze, at=20, section=section, processes=2)
    assert time.monotonic() - frozen[0] < 60
    assert not processes()
    assert start("sft", tmp_path, section=section, processes=2)["steps"] == 600


def test_an_error_of_the_process_is_raised_as_it_was(start: Start, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"offload=True has no effect with sharding='none'"):
        start("sft", tmp_path, section=replace(SECTION, offload=True))
    assert not any((tmp_path / "model").iterdir())
