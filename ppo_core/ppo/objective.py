"""The objective of an update: weighted losses of policy and critic over counted tokens.

A token is counted if the policy sampled it, see `ppo_core.algorithm.masking`.
"""

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
"""Fields of `TokenSums` that each optimizer step increases, in the order of `Objective.sums`."""

OF_CRITIC = ("value_loss", "value_clipped", "new_values")
"""The sums that are 0 without a critic."""


@dataclass(frozen=True, kw_only=True)
class CountedTokens:
    """Data from before the update about a microbatch's N counted tokens; each tensor is (N,)."""

    weights: Tensor
    """Weight of the token in the loss."""

    old_logprobs: Tensor
    """Log-probability under the policy at sampling time."""

    behavior_logprobs: Tensor | None
    """Log-probability under the sampling distribution; None if it was the policy itself."""

    ref_logprobs: Tensor
    """Log-probability under the reference."""

    advantages: Tensor
    old_values: Tensor | None
    """Value at sampling time; None without a critic."""

    returns: Tensor | None
    """Target of the critic; None without a critic."""

    kl_coef: float
    """Weight of the KL divergence in the loss; 0 without `kl_in_loss`."""

    @classmethod
    def of(
        cls, experience: Experience, sequences: Tensor, rows: TokenRows, weights: Tensor
    ) -> Self:
        """Return the counted tokens of n sequences of the full batch.

        `sequences` (n,) are the row numbers of the sequences in the batch, and `rows` contains
        their token ids. `weights` (n,) has one entry for each sequence: the loss weight of each
        counted token of the sequence.
        """
        rollout = experience.rollout
        t = rows.state + 1 - rows.prompt_lengths[rows.row]
        counted = sequences[rows.row], t

        def taken(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[counted]

        return cls(
            weights=weights[rows.row],
            old_logprobs=rollout.logprobs[counted],
            behavior_logprobs=taken(rollout.behavior_logprobs),
            ref_logprobs=experience.ref_logprobs[counted],
            advantages=experience.advantages[counted],
            old_values=taken(experience.values),
            returns=taken(experience.returns),
            kl_coef=experience.kl_loss_coef,
        )


class Objective:
    """The weighted losses of counted tokens, and sums of losses and metrics over these tokens."""

    def __init__(self, config: PPOConfig, tokens: CountedTokens) -> None:
        """Store the settings, and the counted tokens of one microbatch."""
        self._config, self._tokens = config, tokens
        self._of_policy: list[dict[str, Tensor]] = []  # a dict for each part, in order
        self._of_critic: dict[str, Tensor] = {}

    def of_policy(self, logprobs: Tensor, part: slice) -> Tensor:
        """Return the weighted losses (n,) of the tokens in `part`, whose `logprobs` are (n,)."""
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
        if tokens.behavior_logprobs is not None:
            # Correct the losses, because the sampling distribution was not exactly the policy.
            behavior, cap = tokens.behavior_logprobs[part], config.vllm_importance_sampling_cap
            losses = losses * importance_weights(old_logprobs, behavior, cap=cap)
        computed = {"policy_loss": losses.detach(), "clipped": clipped}
        if config.kl_in_loss and config.kl_estimator != "full":
            kl = kl_per_token(logprobs, tokens.ref_logprobs[part], config.kl_estimator)
            losses = losses + tokens.kl_coef * kl
            computed["kl_loss"] = kl.detach()
        self._of_policy.append(computed)
        return tokens.weights[part] * losses

    def of_predictions(self, predicted: Predictions) -> Tensor:
        """Return the policy's summed loss (), plus the exact KL term if it was computed."""
        if predicted.full_kl is None:
            return predicted.loss
        divergence = (self._tokens.weights * predicted.full_kl).sum()
        return predicted.loss + self._tokens.kl_coef * divergence

    def of_critic(self, values: Tensor) -> Tensor:
        """Return the weighted sum () of the value losses of `values` (N,), times `vf_coef`."""
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
        """Return the sums over the N tokens as a float64 tensor (len(SUMS),), in the order of SUMS.

        Call this method after `of_policy` and `of_critic`. The sums stay on the device, because a
        copy to the host would wait for the device.
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
