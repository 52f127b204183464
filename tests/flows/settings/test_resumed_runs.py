"""Which run `resume` continues, and which steps it runs again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.slow_cases import slow

FLOW = """
import os
from pathlib import Path

from flow_parts import run_command
from metaflow import FlowSpec, step


def work(name):
    if os.environ["FAILS_IN"] == name:
        os.kill(os.getppid() if "KILLS" in os.environ else os.getpid(), 9)
        raise SystemExit(1)
    with Path("done").open("a") as file:
        file.write(name + "\\n")


class Chain(FlowSpec):
    @step
    def start(self):
        work("start")
        self.next(self.middle)

    @step
    def middle(self):
        work("middle")
        self.next(self.late)

    @step
    def late(self):
        work("late")
        self.next(self.end)

    @step
    def end(self):
        work("end")


run_command(Chain)
"""


class Chain:
    """A flow of four steps, one of which may fail or kill the scheduler of its run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "chain.py").write_text(FLOW)

    def __call__(self, *words: str, fails_in: str = "", kills: bool = False) -> str:
        environment = {
            **os.environ,
            "FAILS_IN": fails_in,
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(self.folder),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}",
            **({"KILLS": ""} if kills else {}),
        }
        ran = subprocess.run(
            [sys.executable, "chain.py", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode == 0) == (not fails_in), ran.stdout + ran.stderr
        return ran.stdout

    @property
    def done(self) -> list[str]:
        return (self.folder / "done").read_text().split()


@pytest.mark.parametrize("kills", [True, *slow(False)], ids=["killed", "failed"])
def test_resume_continues_the_newest_run_also_after_a_failed_resume(tmp_path: Path, kills: bool):
    chain = Chain(tmp_path)
    chain("run", fails_in="middle", kills=kills)
    chain("resume", fails_in="late", kills=kills)
    chain("resume", fails_in="end", kills=kills)
    said = chain("resume")
    assert chain.done == ["start", "middle", "late", "end"]
    runs = sorted(int(each.name) for each in tmp_path.glob(".metaflow/Chain/[0-9]*"))
    assert f"Resuming run {runs[2]}." in said


@pytest.mark.slow
def test_a_run_that_is_named_is_resumed_and_becomes_the_newest(tmp_path: Path):
    chain = Chain(tmp_path)
    chain("run", fails_in="middle")
    (first,) = (each.name for each in tmp_path.glob(".metaflow/Chain/[0-9]*"))
    chain("run", fails_in="late")
    chain("resume", "--origin-run-id", first, fails_in="end")
    chain("resume")
    assert chain.done == ["start", "start", "middle", "middle", "late", "end"]
