"""An adaptive KL coefficient that keeps the divergence near a target."""

import math
from collections.abc import Mapping

LARGEST_ERROR = 0.2
"""`AdaptiveKL.update` clips the relative deviation from the target to this absolute value."""

HORIZONS, WINDOWS, LOOKAHEADS = 24, 15, 7.5
"""`AdaptiveKL.landing` divides the episodes of a run by these numbers to get horizon, window and
lookahead. With these numbers, simulated divergences ended within 15% of the target in at least 96%
of runs of 30 updates."""


class AdaptiveKL:
    """Raises kl_coef if the expected divergence is above the target, lowers kl_coef if it is below.

        mean    = mean + min(1, episodes / window) * (kl - mean)
        ahead   = mean + (change of the mean per episode) * lookahead
        error   = clip(ahead / target - 1, -0.2, 0.2)
        kl_coef = kl_coef * (1 + error * episodes / horizon)

    The expected divergence is `ahead`. If window and lookahead are 0, ahead = kl, as in the
    log-space proportional controller of arXiv:1909.08593, section 2.2. In both cases, kl_coef
    changes by at most about 20% over `horizon` episodes.
    """

    def __init__(
        self,
        kl_coef: float,
        target: float,
        horizon: float,
        *,
        window: float = 0.0,
        lookahead: float = 0.0,
    ) -> None:
        """Start with `kl_coef`.

        `target` is in nats per response; horizon, window and lookahead are numbers of episodes. The
        horizon must be above LARGEST_ERROR times the episodes of an update, as `make_adaptive_kl`
        checks. Otherwise one update could make kl_coef negative, which would reward divergence.
        """
        self.kl_coef = kl_coef
        self.target = target
        self.horizon = horizon
        self.window = window
        self.lookahead = lookahead
        self._mean: float | None = None

    @classmethod
    def landing(cls, kl_coef: float, target: float, *, episodes: int, batch: int) -> "AdaptiveKL":
        """Return a controller that aims to reach the target at the end of a run.

        The controller uses a moving average of the divergence over the last batches, and the trend
        of this average. It can change kl_coef by a factor of about 100 in a run of 24 updates or
        more, and by at most a fifth per update in a shorter run. `episodes` is the number of
        episodes in the run, `batch` the number in one update.
        """
        return cls(
            kl_coef,
            target,
            horizon=max(episodes / HORIZONS, batch),
            window=episodes / WINDOWS,
            lookahead=episodes / LOOKAHEADS,
        )

    def update(self, kl: float, episodes: int) -> None:
        """Adapt to `kl`, the mean divergence in nats per response of a batch of `episodes`.

        A divergence that is not finite is ignored, because all steps of its batch were skipped.
        """
        if not math.isfinite(kl):
            return
        before = kl if self._mean is None else self._mean
        share = min(1.0, episodes / self.window) if self.window else 1.0
        self._mean = before + share * (kl - before)
        ahead = self._mean + (self._mean - before) / episodes * self.lookahead
        error = min(max(ahead / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.kl_coef *= 1 + error * episodes / self.horizon

    def state_dict(self) -> dict[str, float | None]:
        """Return kl_coef and the moving average, which are all that `update` changes."""
        return {"kl_coef": self.kl_coef, "mean": self._mean}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Resume from the result of `state_dict`; states of version 0.1 contain no mean."""
        assert state["kl_coef"] is not None
        self.kl_coef = state["kl_coef"]
        self._mean = state.get("mean")
