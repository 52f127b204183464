"""Running mean and standard deviation of scores."""

import math
from collections.abc import Mapping

from torch import Tensor

ROUNDING = 1e-12
"""Standard deviations of at most this fraction of |mean| count as 0: they are rounding errors."""


class RunningMoments:
    """Mean and standard deviation of a stream of values.

    Each batch is merged by the formula of Chan, Golub and LeVeque (1979, eq. 2.1) in fp64, so the
    result does not depend on the split into batches.
    """

    def __init__(self) -> None:
        """Start with no values: mean 0, standard deviation 1."""
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Return the standard deviation with Bessel's correction.

        The result is 1 for fewer than two values and for equal values, to avoid division by 0
        (TRL #727).
        """
        if self.count < 2:
            return 1.0
        deviation = math.sqrt(self._squares / (self.count - 1))
        return deviation if deviation > ROUNDING * abs(self.mean) else 1.0

    def update(self, values: Tensor) -> None:
        """Add the values (B,), which must be finite, to the moments."""
        values, count = values.double(), len(values)
        mean = values.mean().item()
        squares = ((values - mean) ** 2).sum().item()
        distance, together = mean - self.mean, self.count + count
        self._squares += squares + distance**2 * self.count * count / together
        self.mean += distance * count / together
        self.count = together

    def scale(self, scores: Tensor, *, center: bool) -> Tensor:
        """Return scores (B,) / std; with `center`, (scores - mean) / std."""
        return (scores - self.mean) / self.std if center else scores / self.std

    def state_dict(self) -> dict[str, float]:
        """Return the state to resume from, as plain numbers."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from the result of `state_dict`."""
        self.count, self.mean = state["count"], state["mean"]
        self._squares = state["squares"]
