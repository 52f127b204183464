"""Measure how far the reward has fallen below its best level, in units of its noise."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

WINDOW = 10
"""Number of updates in a window; the reward is averaged over a window."""

NOISE_PER_CHANGE = 0.886
"""Standard deviation of normal noise divided by the mean absolute difference of two values."""


class RewardDrop:
    """Compares the last updates of a run with the best earlier updates.

        drop  = (best mean of WINDOW earlier updates - mean of the last WINDOW updates) / noise
        noise = 0.886 x mean of |reward[t] - reward[t-1]| over the run

    The noise of one update is estimated from differences of consecutive rewards (von Neumann et
    al., 1941), because a slow rise or fall hardly changes these differences. Without a trend, the
    first drop has mean 0 and standard deviation 0.45. The mean of later drops is higher, because
    the best of more windows is higher.
    """

    def __init__(self) -> None:
        """Start before the first update."""
        self._recent: list[float] = []
        self._best: float | None = None
        self._changes = 0.0
        self._updates = 0

    def update(self, reward: float) -> float | None:
        """Add the finite reward of an update; return the drop.

        The result is None until there are two windows of updates, and while all rewards are equal.
        """
        if self._recent:
            self._changes += abs(reward - self._recent[-1])
        self._updates += 1
        self._recent = [*self._recent, reward][-2 * WINDOW :]
        if len(self._recent) < 2 * WINDOW or self._changes == 0:
            return None
        earlier, last = fmean(self._recent[:WINDOW]), fmean(self._recent[WINDOW:])
        self._best = earlier if self._best is None else max(self._best, earlier)
        noise = NOISE_PER_CHANGE * self._changes / (self._updates - 1)
        return (self._best - last) / noise

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, serializable as JSON."""
        return {
            "recent": list(self._recent),
            "best": self._best,
            "changes": self._changes,
            "updates": self._updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._recent, self._best = list(state["recent"]), state["best"]
        self._changes, self._updates = state["changes"], state["updates"]
