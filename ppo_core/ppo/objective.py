"""The objective of an update: weighted losses of policy and critic over counted tokens."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from ppo_core.algorithm.kl import kl_per_token
from ppo_core.algorithm.losses import importance_weights, policy_loss, value_loss
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.types import Experience, TokenRows, TokenSums
from ppo_core.models.policy import Predictions

SUMS = [entry.name for entry in fields(TokenSums) if not entry.name.startswith("first_")]
"""Fields of `TokenSums` that an optimizer step adds to, in the order of `Objective.sums`."""

OF_CRITIC = ("value_loss", "value_clipped", "new_values")
"""The sums that are 0 without a critic."""


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
    old_values: Tensor | None
    """None without a critic, as `returns`."""

    returns: Tensor | None
    kl_coef: float
    """Weight of the KL divergence in the loss."""

    @classmethod
    def of(
        cls, experience: Experience, sequences: Tensor, rows: TokenRows, weights: Tensor
    ) -> Self:
        """Take the counted tokens of sequences (n,).

        `rows` are these sequences, and weights (n,) are the weights of their tokens.
        """
        rollout = experience.rollout
        t = rows.state + 1 - rows.prompt_lengths[rows.row]
        counted = sequences[rows.row], t

        def taken(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[counted]

        return cls(
            weights=weights[rows.row],
            old_logprobs=rollout.logprobs[counted],
            behaviour_logprobs=taken(rollout.behaviour_logprobs),
            ref_logprobs=experience.ref_logprobs[counted],
            advantages=experience.advantages[counted],
            old_values=taken(experience.values),
            returns=taken(experience.returns),
            kl_coef=experience.kl_loss_coef,
        )


class Objective:
    """The weighted losses of counted tokens, and the sums of what was computed with them."""

    def __init__(self, config: PPOConfig, tokens: CountedTokens) -> None:
        """Take the settings, and the tokens of one microbatch."""
        self._config, self._tokens = config, tokens
        self._of_policy: list[dict[str, Tensor]] = []  # of each part of the tokens, in order
        self._of_critic: dict[str, Tensor] = {}

    def of_policy(self, logprobs: Tensor, part: slice) -> Tensor:
        """Return weighted losses (n,) of the log-probabilities (n,) of the tokens in `part`."""
        config, tokens = self._config, self._tokens
        old_logprobs = tokens.old_logprobs[part]
        losses, clipped = policy_loss(
            logprobs,
            old_logprobs,
            tokens.advantages[part],
            cliprange=config.cliprange,
            cliprange_high=config.cliprange_high,
            dual_clip=config.dual_clip,
        )
        if tokens.behaviour_logprobs is not None:
            # Correct the losses of tokens that another distribution than the policy sampled.
            behaviour, cap = tokens.behaviour_logprobs[part], config.vllm_importance_sampling_cap
            losses = losses * importance_weights(old_logprobs, behaviour, cap=cap)
        computed = {"policy_loss": losses.detach(), "clipped": clipped}
        if config.kl_in_loss and config.kl_estimator != "full":
            kl = kl_per_token(logprobs, tokens.ref_logprobs[part], config.kl_estimator)
            losses = losses + tokens.kl_coef * kl
            computed["kl_loss"] = kl.detach()
        self._of_policy.append(computed)
        return tokens.weights[part] * losses

    def of_predictions(self, predicted: Predictions) -> Tensor:
        """Return the policy's summed loss (), including the exact KL divergence if predicted."""
        if predicted.full_kl is None:
            return predicted.loss
        divergence = (self._tokens.weights * predicted.full_kl).sum()
        return predicted.loss + self._tokens.kl_coef * divergence

    def of_critic(self, values: Tensor) -> Tensor:
        """Return the summed loss () of the critic's values (N,), times `vf_coef`."""
        config, tokens = self._config, self._tokens
        assert tokens.old_values is not None
        assert tokens.returns is not None
        losses, clipped = value_loss(
            values, tokens.old_values, tokens.returns, cliprange_value=config.cliprange_value
        )
        self._of_critic = {
            "value_loss": losses.detach(),
            "value_clipped": clipped,
            "new_values": values.detach(),
        }
        return config.vf_coef * (tokens.weights * losses).sum()

    @torch.no_grad()
    def sums(self, predicted: Predictions) -> Tensor:
        """Return the sums over the N tokens (len(SUMS),), in the order of SUMS, in float64.

        Call it after the losses. The sums stay on the device: reading one of them on the host
        would wait for the device.
        """
        moved = predicted.logprobs - self._tokens.old_logprobs
        ratio_error = torch.expm1(moved)
        nothing = torch.zeros_like(moved)
        kl = nothing if predicted.full_kl is None else predicted.full_kl
        names = self._of_policy[0]
        per_token = {
            "tokens": torch.ones_like(moved),
            "kl_loss": kl,
            "entropy": predicted.entropies,
            "approxkl": 0.5 * moved**2,
            "kl_from_old": ratio_error - moved,
            "ratio_error": ratio_error,
            "abs_ratio_error": ratio_error.abs(),
            "ratio_error_squared": ratio_error**2,
            **{name: torch.cat([part[name] for part in self._of_policy]) for name in names},
            **(self._of_critic or dict.fromkeys(OF_CRITIC, nothing)),
        }
        return torch.stack([per_token[name].sum().double() for name in SUMS])
