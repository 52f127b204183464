"""Progress within a step: who is told, and which lines a log has."""

from pathlib import Path
from threading import Thread

import pytest

from ppo_core.io import progress_bar
from ppo_core.io.progress_bar import (
    PROGRESS_FILE,
    PhaseLines,
    ProgressFile,
    each_pass,
    listening,
    progress,
)


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def moved(self, phase: str) -> None:
        self.said.append(phase)

    def ended(self, phase: str) -> None:
        self.said.append(f"{phase} ended")


def test_each_pass_tells_the_listeners_before_it_and_at_the_end():
    heard = Heard()
    with listening(heard):
        assert list(each_pass([1, 2], "scoring")) == [1, 2]
    assert heard.said == ["scoring", "scoring", "scoring ended"]
    assert list(each_pass([3], "scoring")) == [3]
    assert len(heard.said) == 3


def test_a_bar_tells_its_listeners_in_each_thread_that_advances_it():
    heard = Heard()
    with listening(heard), progress(2, "fetch", "B", hidden=True) as bar:
        thread = Thread(target=bar.update)
        thread.start()
        thread.join()
        assert heard.said == ["fetch", "fetch"]
    bar.close()  # as tqdm does when it deletes a bar
    assert heard.said == ["fetch", "fetch", "fetch ended"]


def test_a_full_disk_for_the_progress_file_ends_no_phase(tmp_path: Path):
    (tmp_path / PROGRESS_FILE).symlink_to("/dev/full")
    ProgressFile(tmp_path).moved("scoring")


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_bar, "time", clock)
    return clock


def test_a_silent_phase_is_shown_every_ten_minutes_and_a_moving_one_is_not(clock: Clock, capsys):
    with progress(100, "ppo", "episode") as bar, listening(PhaseLines(bar)):
        phases = ((300, "sampling"), (601, "scoring"), (900, "scoring"), (1202, "updating"))
        for seconds, phase in phases:
            clock.now = seconds
            list(each_pass([1], phase))
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(" 0 %")[0] for line in lines] == ["ppo, scoring", "ppo, updating"]
        # The phase itself moved, so its next silence begins here.
        bar.update(10)
        clock.now += 599
        list(each_pass([1], "sampling"))
        assert "sampling" not in capsys.readouterr().err


def test_a_hidden_bar_shows_no_phase(clock: Clock, capsys):
    with progress(100, "ppo", "episode", hidden=True) as bar, listening(PhaseLines(bar)):
        clock.now = 60
        list(each_pass([1], "scoring"))
    assert capsys.readouterr().err == ""


def lines_of(clock: Clock, capsys, *, step: int, seconds: float, delay: float = 0.0) -> list[str]:
    """The lines of 100 episodes, `step` at a time and each for `seconds`."""
    with progress(100, "ppo", "episode", delay=delay) as bar:
        for _ in range(100 // step):
            clock.now += seconds
            bar.update(step)
    return [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]


def test_a_long_phase_has_a_line_for_each_tenth(clock: Clock, monkeypatch, capsys):
    monkeypatch.setattr("tqdm.std.time", clock.monotonic)
    tenths = [f"ppo {percent} %" for percent in range(10, 101, 10)]
    assert lines_of(clock, capsys, step=1, seconds=4.0) == tenths
    assert lines_of(clock, capsys, step=10, seconds=3600.0) == tenths
    # A tenth takes 10 seconds: one line in 30.
    shown = [f"ppo {percent} %" for percent in (30, 60, 90, 100)]
    assert lines_of(clock, capsys, step=1, seconds=1.0) == shown
    assert lines_of(clock, capsys, step=1, seconds=0.2) == ["ppo 100 %"]
    assert lines_of(clock, capsys, step=1, seconds=0.2, delay=5.0) == []


def test_a_line_tells_rate_time_and_numbers(clock: Clock, monkeypatch, capsys):
    monkeypatch.setattr("tqdm.std.time", clock.monotonic)
    with progress(100, "ppo", "episode") as bar:
        clock.now += 40
        bar.set_postfix(score="1.50", kl="0.25", refresh=False)
        bar.update(20)
        told = "ppo 20 %: 20/100 episode,  0.50 episode/s, 02:40 left, kl=0.25, score=1.50"
        assert capsys.readouterr().err.splitlines() == [told]
    # The end of a phase that was interrupted was already shown.
    assert capsys.readouterr().err == ""


def test_a_phase_of_unknown_length_has_a_line_every_ten_minutes(clock: Clock, capsys):
    lines = []
    with progress(None, "timing", "pass") as bar:
        for _ in range(40):
            clock.now += 60
            bar.keep_showing()
            lines += [(clock.now, line) for line in capsys.readouterr().err.splitlines() if line]
    assert [at for at, _ in lines] == [600, 1200, 1800, 2400]
    assert all(line.startswith("timing: 0 pass, ") for _, line in lines)


def test_a_hidden_bar_has_no_line(monkeypatch, capsys):
    with progress(4, "timing", "pass", hidden=True) as bar:
        bar.keep_showing()
    assert capsys.readouterr().err == ""
