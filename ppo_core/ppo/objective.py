"""The objective of an update: weighted losses of policy and critic over counted tokens."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Self

import torch
from torch import Tensor

from ppo_core.algorithm.kl import kl_per_token
from ppo_core.algorithm.losses import importance_weights, policy_loss, value_loss
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.types import Experience, TokenSums
from ppo_core.models.policy import Predictions

ALL = slice(None)

SUMS = [entry.name for entry in fields(TokenSums) if not entry.name.startswith("first_")]
"""Fields of `TokenSums` that an optimizer step adds to, in the order of `Objective.sums`."""


@dataclass(frozen=True, kw_only=True)
class CountedTokens:
    """The N counted tokens of a microbatch, as they were before the update; fields are (N,)."""

    weights: Tensor
    """Weight in the loss."""

    old_logprobs: Tensor
    """Log-probability when it was sampled."""

    behaviour_logprobs: Tensor | None
    """Log-probability under the distribution it was drawn from, if that is not the policy."""

    ref_logprobs: Tensor
    """Log-probability under the reference."""

    advantages: Tensor
    old_values: Tensor
    returns: Tensor
    kl_coef: float
    """Weight of the KL divergence in the loss."""

    @classmethod
    def of(cls, experience: Experience, rows: Tensor, weights: Tensor) -> Self:
        """Take the counted tokens of `rows` (n,); `weights` (n,) weigh each token of a row."""
        rollout = experience.rollout
        mask = rollout.response_mask[rows]

        def counted(values: Tensor) -> Tensor:
            return values[rows][mask]

        behaviour = rollout.behaviour_logprobs
        return cls(
            weights=weights[mask.nonzero()[:, 0]],
            old_logprobs=counted(rollout.logprobs),
            behaviour_logprobs=None if behaviour is None else counted(behaviour),
            ref_logprobs=counted(experience.ref_logprobs),
            advantages=counted(experience.advantages),
            old_values=counted(experience.values),
            returns=counted(experience.returns),
            kl_coef=experience.kl_loss_coef,
        )


@dataclass(frozen=True)
class Objective:
    """The weighted losses of counted tokens."""

    config: PPOConfig
    tokens: CountedTokens

    def of_policy(self, logprobs: Tensor, part: slice) -> Tensor:
        """Return weighted losses (n,) of the log-probabilities (n,) of the tokens in `part`."""
        tokens = self.tokens
        losses, _ = self._clipped_loss(logprobs, tokens.old_logprobs[part], tokens.advantages[part])
        losses = self._importance_weighted(losses, part)
        if self._estimates_divergence:
            losses = losses + tokens.kl_coef * self._divergences(logprobs, part)
        return tokens.weights[part] * losses

    def of_predictions(self, predicted: Predictions) -> Tensor:
        """Return the policy's summed loss (), including the exact KL divergence if predicted."""
        if predicted.full_kl is None:
            return predicted.loss
        divergence = (self.tokens.weights * predicted.full_kl).sum()
        return predicted.loss + self.tokens.kl_coef * divergence

    def of_critic(self, values: Tensor) -> Tensor:
        """Return the summed loss () of the critic's values (N,), times `vf_coef`."""
        losses, _ = self._value_losses(values)
        return self.config.vf_coef * (self.tokens.weights * losses).sum()

    @torch.no_grad()
    def sums(self, predicted: Predictions, values: Tensor) -> Tensor:
        """Return the sums over the N tokens (len(SUMS),), in the order of SUMS, in float64.

        They stay on the device: reading one of them on the host would wait for the device.
        """
        policy_losses, clipped = self._clipped_loss(
            predicted.logprobs, self.tokens.old_logprobs, self.tokens.advantages
        )
        policy_losses = self._importance_weighted(policy_losses, ALL)
        value_losses, value_clipped = self._value_losses(values)
        divergences = predicted.full_kl
        if divergences is None and self._estimates_divergence:
            divergences = self._divergences(predicted.logprobs, ALL)
        if divergences is None:
            divergences = torch.zeros_like(policy_losses)
        moved = predicted.logprobs - self.tokens.old_logprobs
        ratio_error = torch.expm1(moved)
        per_token = {
            "tokens": torch.ones_like(moved),
            "policy_loss": policy_losses,
            "value_loss": value_losses,
            "new_values": values,
            "kl_loss": divergences,
            "entropy": predicted.entropies,
            "approxkl": 0.5 * moved**2,
            "kl_from_old": ratio_error - moved,
            "clipped": clipped,
            "value_clipped": value_clipped,
            "ratio_error": ratio_error,
            "abs_ratio_error": ratio_error.abs(),
            "ratio_error_squared": ratio_error**2,
        }
        return torch.stack([per_token[name].sum().double() for name in SUMS])

    @property
    def _estimates_divergence(self) -> bool:
        return self.config.kl_in_loss and self.config.kl_estimator != "full"

    @property
    def _clipped_loss(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """`policy_loss` with the clipping of the settings."""
        config = self.config
        return partial(
            policy_loss,
            cliprange=config.cliprange,
            cliprange_high=config.cliprange_high,
            dual_clip=config.dual_clip,
        )

    def _importance_weighted(self, losses: Tensor, part: slice) -> Tensor:
        """Correct the losses of tokens that another distribution than the policy sampled."""
        tokens = self.tokens
        if tokens.behaviour_logprobs is None:
            return losses
        return losses * importance_weights(
            tokens.old_logprobs[part],
            tokens.behaviour_logprobs[part],
            cap=self.config.vllm_importance_sampling_cap,
        )

    def _divergences(self, logprobs: Tensor, part: slice) -> Tensor:
        return kl_per_token(logprobs, self.tokens.ref_logprobs[part], self.config.kl_estimator)

    def _value_losses(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return value_loss(
            values,
            self.tokens.old_values,
            self.tokens.returns,
            cliprange_value=self.config.cliprange_value,
        )
