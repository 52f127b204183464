"""A phase without progress is ended, and what its threads were doing is kept."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.launch import stall_watch
from pipeline.launch.stall_watch import StallWatch, _StepWatch
from tests.helpers.paths import ROOT

STEP = """
import sys, time
from pathlib import Path
from pipeline.launch.stall_watch import watched_step
from ppo_core.io.progress_bar import progress

def hang():
    time.sleep(600)

folder = Path(sys.argv[1])
stall, step = map(float, sys.argv[2:])
def release(problem):
    print(f"released: {problem}", flush=True)

with watched_step(
    "evaluate", folder, stall_minutes=stall, step_minutes=step, on_hang=release
):
    {body}
print("over")
"""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(stall_watch.time, "monotonic", lambda: self.now)

    def advance(self, watch: StallWatch, *gaps: float) -> None:
        for gap in gaps:
            self.now += gap
            watch.advance()
            watch.has_stalled()

    def check(self, watch: StallWatch, seconds: int) -> bool:
        """Check the watch each second, because a long gap between checks counts as a suspension."""
        stalled = False
        for _ in range(seconds):
            self.now += 1
            stalled = watch.has_stalled()
        return stalled


def test_the_limit_is_the_setting_or_twenty_times_the_median(monkeypatch):
    clock = Clock(monkeypatch)
    watch = StallWatch(minutes=1)
    assert watch.limit() == 60
    clock.advance(watch, 50, 1, 2, 3)
    assert watch.limit() == 60
    clock.advance(watch, 10, 10, 10)
    # Waits after the first one: 1, 2, 3, 10, 10, 10.
    assert watch.limit() == pytest.approx(20 * 6.5)
    assert not clock.check(watch, 130)
    assert clock.check(watch, 1)


def test_signs_between_two_advances_count_for_no_limit(monkeypatch):
    clock = Clock(monkeypatch)
    watch = StallWatch(minutes=1)
    for _ in range(4):
        for _ in range(10):
            clock.now += 10
            watch.stay_alive()
            assert not watch.has_stalled()
        watch.advance()
    assert watch.limit() == 20 * 100


def test_a_suspension_of_the_process_is_no_stall(monkeypatch):
    clock = Clock(monkeypatch)
    watch = StallWatch(minutes=30)
    assert not clock.check(watch, 1000)
    clock.now += 3 * 3600
    assert not watch.has_stalled()
    assert not clock.check(watch, 1800)
    assert clock.check(watch, 1)


def test_a_suspension_of_the_process_is_no_time_of_the_step(monkeypatch, tmp_path: Path):
    clock = Clock(monkeypatch)
    watch = _StepWatch("evaluate", tmp_path, 30, 60, lambda problem: None)
    for _ in range(1000):
        clock.now += 1
        assert watch.seconds() == clock.now - 1000
    clock.now += 3 * 3600
    assert watch.seconds() == 1000
    clock.now += 1
    assert watch.seconds() == 1001


def test_a_phase_may_end_in_another_thread_while_it_moves(tmp_path: Path):
    class EndsAfterTheFirstLook(dict):
        def __contains__(self, phase: object) -> bool:
            return self.pop(phase, None) is not None

    watch = _StepWatch("evaluate", tmp_path, 30, 60, lambda problem: None)
    watch._phases = EndsAfterTheFirstLook()
    watch.moved("judging")
    watch.moved("judging")
    assert list(watch._phases) == ["judging"]


def run_step(folder: Path, body: str, *, stall: float, step: float) -> subprocess.CompletedProcess:
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", STEP.replace("{body}", body), folder, str(stall), str(step)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - started < 60
    return ended


def test_a_bar_that_stops_ends_the_step_with_the_stacks(tmp_path):
    body = "\n    ".join(
        ["with progress(9, 'judging', 'pair') as bar:", "    bar.update()", "    hang()"]
    )
    ended = run_step(tmp_path, body, stall=0.02, step=0)
    assert ended.returncode == 1
    assert "evaluate: 'judging' made no progress for 0.02 minutes (stall_minutes=0.02)." in (
        ended.stderr
    )
    file = tmp_path / "stacks-evaluate.txt"
    assert str(file) in ended.stderr
    assert "in hang" in file.read_text()
    # A scheduler keeps the log but not the file, and nothing else would release the lease.
    assert "in hang" in ended.stderr
    assert ended.stdout.startswith("released: evaluate: 'judging' made no progress")


def test_a_step_without_a_bar_may_take_its_time(tmp_path):
    ended = run_step(tmp_path, "time.sleep(3)", stall=0.02, step=0)
    assert (ended.returncode, ended.stdout) == (0, "over\n")


def test_a_bar_that_moves_may_take_its_time(tmp_path):
    body = "with progress(9, 'judging', 'pair') as bar:\n        "
    body += "for _ in range(12): time.sleep(0.25); bar.update()"
    ended = run_step(tmp_path, body, stall=0.02, step=0)
    assert (ended.returncode, ended.stdout) == (0, "over\n")


def test_a_step_ends_after_its_time(tmp_path):
    ended = run_step(tmp_path, "hang()", stall=9, step=0.02)
    assert ended.returncode == 1
    assert "evaluate: not over after step_minutes=0.02." in ended.stderr
