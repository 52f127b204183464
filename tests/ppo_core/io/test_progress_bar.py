"""Progress within a step: who is told, and what a log shows after a long silence."""

import re

import pytest

from ppo_core.io import progress_bar
from ppo_core.io.progress_bar import PhaseLines, each_pass, listening, progress


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


def test_a_silent_bar_is_shown_with_the_phase_and_a_moving_one_is_not(clock: Clock, capsys):
    with progress(100, "ppo", "episode") as bar, listening(PhaseLines(bar)):
        capsys.readouterr()
        for seconds, phase in ((5, "sampling"), (11, "scoring"), (15, "scoring"), (22, "updating")):
            clock.now = seconds
            list(each_pass([1], phase))
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["ppo, scoring", "ppo, updating"]
        # The bar itself moved, so its next silence begins here.
        bar.update(10)
        clock.now += 9
        capsys.readouterr()
        list(each_pass([1], "sampling"))
        assert "sampling" not in capsys.readouterr().err


def test_a_hidden_bar_shows_no_phase(clock: Clock, capsys):
    with progress(100, "ppo", "episode", hidden=True) as bar, listening(PhaseLines(bar)):
        clock.now = 60
        list(each_pass([1], "scoring"))
    assert capsys.readouterr().err == ""


def test_a_long_step_has_a_line_every_ten_seconds(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines = []
    with progress(None, "timing", "pass") as bar:
        capsys.readouterr()
        for _ in range(60):
            now += 1
            bar.keep_showing()
            lines += [(now, line) for line in capsys.readouterr().err.splitlines() if line]
        bar.total = 4
        bar.update(1)
    assert progress_bar.SECONDS_BETWEEN_LINES * 2 == 10
    assert [at for at, _ in lines] == [1010, 1020, 1030, 1040, 1050, 1060]
    assert all(line.startswith("timing: 0pass [") for _, line in lines)
    assert re.search(r"timing:  25%\|.*1/4", capsys.readouterr().err)


def test_a_hidden_bar_has_no_line(monkeypatch, capsys):
    with progress(4, "timing", "pass", hidden=True) as bar:
        bar.keep_showing()
    assert capsys.readouterr().err == ""
