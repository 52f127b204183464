"""A KL coefficient that follows the divergence it is to keep."""

import math
from collections.abc import Mapping

LARGEST_ERROR = 0.2
"""Share of the target beyond which a larger distance from it no longer counts."""


class AdaptiveKL:
    """Raises the coefficient while the policy is too far away, lowers it while it is too near.

        error   = clip(kl / target - 1, -0.2, 0.2)
        kl_coef = kl_coef * (1 + error * episodes / horizon)

    (arXiv:1909.08593, section 2.2.) A proportional controller of log(kl_coef), which changes by
    about a fifth over one horizon at most.
    """

    def __init__(self, kl_coef: float, target: float, horizon: int) -> None:
        """Start at `kl_coef`; `target` is in nats a response, `horizon` in episodes."""
        self.kl_coef = kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, episodes: int) -> None:
        """Adapt to the mean divergence of a batch, in nats a response, of so many episodes.

        One that is not a number, of a batch that nothing is learned from, changes nothing.

        Raises:
            ValueError: the batch is so large beside the horizon that one update could make the
                coefficient 0 or negative, which would reward distance from the reference.
        """
        if (least := LARGEST_ERROR * episodes) >= self.horizon:
            raise ValueError(
                f"kl_horizon={self.horizon} is too short for {episodes} episodes an update: one "
                f"update could make kl_coef 0 or negative. Set it above {least:g}."
            )
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.kl_coef *= 1 + error * episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs; target and horizon are settings."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.kl_coef = state["kl_coef"]
