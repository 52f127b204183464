"""Mistakes of a first day: one message with the wrong input and the next move answers each.

`make hostile` runs them all. The cheap ones, which the command line and the settings decide, must
be answered before a slow library is imported; `python -m tests.benchmarks.measure_mistakes` prints
in how many seconds.
"""

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.helpers.runs.forked_python import run_python
from tests.hostile.first_day import (
    environment_in,
    make_inputs,
    message_of,
    run_command,
    words_of,
)
from tests.hostile.natural_mistakes import MISTAKES, Mistake

SLOW = {"torch", "datasets", "mlflow", "deepspeed", "accelerate", "openai", "statsmodels"}
"""Libraries whose import takes a second and more."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def versions_in(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return database.execute("select count(*) from model_versions").fetchone()[0]


def is_slow(mistake: Mistake) -> bool:
    """Whether a mistake is run as a process of its own, which imports the libraries anew."""
    return mistake.is_cheap or "flows/rlhf.py" in mistake.command


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=name, marks=[pytest.mark.slow] if is_slow(mistake) else [])
        for name, mistake in MISTAKES.items()
    ],
)
def test_a_natural_mistake_is_answered_with_the_next_move(
    inputs: Path, tmp_path: Path, mistake: Mistake
):
    folder = Path(shutil.copytree(inputs, tmp_path / "here"))
    imported: set[str] = set()
    if is_slow(mistake):
        code, told, imported = run_command(mistake, folder)
    else:
        _, words = words_of(mistake)
        # The program gets only these variables, and none that another test set.
        with patch.dict(os.environ, environment_in(folder), clear=True):
            ran = run_python(*words, folder=folder)
        code, told = ran.returncode, ran.stdout + ran.stderr
    message = message_of(told)
    assert (code == 0) == mistake.is_accepted, message
    assert "Traceback" not in told, told
    assert re.search(mistake.names, message), message
    assert re.search(mistake.offers, message), message
    assert versions_in(folder) == 1
    assert not imported & SLOW
    if mistake.is_cheap:
        assert "ppo_core" in imported
