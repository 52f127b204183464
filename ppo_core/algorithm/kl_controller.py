"""An adaptive KL coefficient that keeps the divergence near a target."""

import math
from collections.abc import Mapping

LARGEST_ERROR = 0.2
"""Bound on the relative deviation of the divergence from its target, per update."""


class AdaptiveKL:
    """Raises kl_coef while the divergence is above its target, and lowers kl_coef while below.

        error   = clip(kl / target - 1, -0.2, 0.2)
        kl_coef = kl_coef * (1 + error * episodes / horizon)

    This is a proportional controller of log(kl_coef) (arXiv:1909.08593, section 2.2). It changes
    kl_coef by at most about 20% over `horizon` episodes.
    """

    def __init__(self, kl_coef: float, target: float, horizon: int) -> None:
        """Start with `kl_coef`; `target` is in nats per response, and `horizon` in episodes."""
        self.kl_coef = kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, episodes: int) -> None:
        """Adapt to `kl`, the mean divergence in nats per response of a batch of `episodes`.

        A NaN is ignored: it comes from a batch without any training step.

        Raises:
            ValueError: the batch is so large relative to the horizon that one update could make
                the coefficient 0 or negative; a negative coefficient would reward divergence.
        """
        if (least := LARGEST_ERROR * episodes) >= self.horizon:
            raise ValueError(
                f"kl_horizon={self.horizon} is too short for {episodes} episodes per update: one "
                f"update could make kl_coef 0 or negative. Set kl_horizon above {least:g}."
            )
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.kl_coef *= 1 + error * episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the state to resume from, without target and horizon, which are settings."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from the result of `state_dict`."""
        self.kl_coef = state["kl_coef"]
