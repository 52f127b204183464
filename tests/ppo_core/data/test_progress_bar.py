"""Progress within a step: who is told, and what a log shows after a long silence."""

import pytest

from ppo_core.data import progress_bar
from ppo_core.data.progress_bar import PhaseLines, each_pass, listening, progress


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
    with progress(100, "ppo", "episode") as bar, listening(PhaseLines(bar, "ppo")):
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
    with progress(100, "ppo", "episode", hidden=True) as bar, listening(PhaseLines(bar, "ppo")):
        clock.now = 60
        list(each_pass([1], "scoring"))
    assert capsys.readouterr().err == ""
