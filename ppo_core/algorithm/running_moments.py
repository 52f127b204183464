"""Mean and standard deviation of all scores seen so far."""

import math
from collections.abc import Mapping

from torch import Tensor

ROUNDING = 1e-12
"""A standard deviation below this share of the mean is what rounding makes of equal values."""


class RunningMoments:
    """Mean and standard deviation of a stream of values.

    Batches are joined by the parallel update of Chan, Golub and LeVeque (1979, eq. 2.1), in fp64
    and around the mean, so that the split into batches changes nothing.
    """

    def __init__(self) -> None:
        """Start with no values: mean 0, standard deviation 1."""
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """Standard deviation with Bessel's correction; 1 where the values do not tell one.

        That is for fewer than two values, or equal ones: nothing is divided by 0 (TRL #727).
        """
        if self.count < 2:
            return 1.0
        deviation = math.sqrt(self._squares / (self.count - 1))
        return deviation if deviation > ROUNDING * abs(self.mean) else 1.0

    def update(self, values: Tensor) -> None:
        """Take in the next values (B,), which are finite."""
        values, count = values.double(), len(values)
        mean = values.mean().item()
        squares = ((values - mean) ** 2).sum().item()
        distance, together = mean - self.mean, self.count + count
        self._squares += squares + distance**2 * self.count * count / together
        self.mean += distance * count / together
        self.count = together

    def scale(self, scores: Tensor, *, center: bool) -> Tensor:
        """Scores (B,) over the standard deviation; with `center` less the mean first."""
        return (scores - self.mean) / self.std if center else scores / self.std

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs, as plain numbers."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.count, self.mean = state["count"], state["mean"]
        self._squares = state["squares"]
