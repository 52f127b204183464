"""The database that the first run creates."""

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

CONNECT = (
    "from pipeline.tracking.mlflow_client import connect;"
    "print(connect().search_experiments()[0].artifact_location)"
)


def start(folder: Path) -> subprocess.Popen[str]:
    variables = {key: value for key, value in os.environ.items() if "MLFLOW" not in key}
    return subprocess.Popen(
        [sys.executable, "-c", CONNECT],
        cwd=folder,
        env=variables | {"PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tables_of(file: Path) -> set[str]:
    with closing(sqlite3.connect(file)) as database:
        return {name for (name,) in database.execute("SELECT name FROM sqlite_master")}


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_creates_the_database_leaves_none(tmp_path: Path):
    killed = start(tmp_path)
    while not (found := [*tmp_path.glob(".mlflow.db.*")]) or found[0].stat().st_size < 100_000:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert not (tmp_path / "mlflow.db").exists()
    # Two processes at the same time: one of them creates the database.
    both = [start(tmp_path) for _ in range(2)]
    outputs = [one.communicate() for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {f"{tmp_path}/mlruns/0"}
    assert {"experiments", "registered_models", "alembic_version"} <= tables_of(
        tmp_path / "mlflow.db"
    )
    assert {*tmp_path.glob(".mlflow.db.*")} <= {
        *found,
        found[0].with_name(f"{found[0].name}-journal"),
    }
