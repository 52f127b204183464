"""Records passed between the phases of a PPO step.

`ppo_core.algorithm.masking` explains the dimensions and the term "counted token".
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_core.algorithm.masking import length_mask


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Prompts and the policy's sampled responses."""

    prompt_ids: Tensor
    """(B, P) token ids, right-padded."""

    prompt_lengths: Tensor
    """(B,) number of tokens of each prompt."""

    response_ids: Tensor
    """(B, T) token ids, right-padded."""

    response_lengths: Tensor
    """(B,) number of tokens of each response, the stop token included; at least 1."""

    has_stop: Tensor
    """(B,) True where the response ends in the stop token."""

    logprobs: Tensor
    """(B, T) log-probability of each token under the policy at sampling time; 0 if not counted."""

    temperature: float
    """Sampling temperature."""

    response_mask: Tensor
    """(B, T) True for counted tokens, the stop token included; every phase uses this mask."""

    behavior_logprobs: Tensor | None = None
    """(B, T) log-probabilities under the sampling distribution; None if tokens were sampled from
    the policy itself, without top_k, top_p or another inference engine."""

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self.response_ids)

    @property
    def row_lengths(self) -> Tensor:
        """Return the number of tokens (B,) of prompt plus response."""
        return self.prompt_lengths + self.response_lengths

    def token_rows(self, rows: Tensor) -> "TokenRows":
        """Return the sequences of the given rows, without padding between prompt and response."""
        prompt_lengths, responses = self.prompt_lengths[rows], self.response_ids[rows]
        lengths = self.row_lengths[rows]
        width = int(lengths.max())
        prompts = self.prompt_ids[rows][:, :width]
        ids = torch.nn.functional.pad(prompts, (0, width - prompts.shape[1]))
        t = torch.arange(width, device=ids.device) - prompt_lengths[:, None]
        ids = torch.where(t < 0, ids, responses.gather(1, t.clamp(0, responses.shape[1] - 1)))
        ids = torch.where(length_mask(lengths, width), ids, 0)
        # `nonzero` waits for the device, so later operations use its indices instead of the mask.
        row, t = self.response_mask[rows].nonzero(as_tuple=True)
        position = prompt_lengths[row] + t
        return TokenRows(
            ids=ids,
            lengths=lengths,
            prompt_lengths=prompt_lengths,
            row=row,
            state=position - 1,
            targets=ids[row, position],
        )


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Sequences of prompt and response, and the positions of all N counted tokens."""

    ids: Tensor
    """(B, S) token ids, right-padded."""

    lengths: Tensor
    """(B,) number of tokens of each sequence."""

    prompt_lengths: Tensor
    """(B,) number of tokens of each prompt."""

    row: Tensor
    """(N,) index of each counted token's sequence, in ascending order."""

    state: Tensor
    """(N,) position before each counted token; the hidden state there predicts the token."""

    targets: Tensor
    """(N,) ids of the counted tokens."""

    def to(self, device: torch.device) -> "TokenRows":
        """Return a copy on another device."""
        return TokenRows(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Outputs of reference, critic and reward model for a rollout."""

    ref_logprobs: Tensor
    """(B, T) log-probabilities under the reference; 0 where not counted."""

    values: Tensor | None
    """(B, T) critic's value of the state before each token; 0 where not counted. None without a
    critic."""

    scores: Tensor
    """(B,) total score of each response."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    """Name of each reward -> its scores (B,) before weighting; may be empty."""

    full_kl: Tensor | None = None
    """(B, T) exact KL divergence at each counted token; None unless `kl_estimator` is full."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Training data of one update."""

    rollout: Rollout
    values: Tensor | None
    """(B, T) values at sampling time; None without a critic."""

    ref_logprobs: Tensor
    """(B, T) log-probabilities under the reference, for the KL term of the loss."""

    kl_loss_coef: float = 0.0
    """Weight of the KL term of the loss."""

    advantages: Tensor
    """(B, T) advantages, standardized over the batch if the settings ask for that."""

    returns: Tensor | None
    """(B, T) critic's targets: unstandardized advantages plus values; None without a critic."""


@dataclass(kw_only=True)
class TokenSums:
    """Sums over the counted tokens of an update; division by `tokens` gives means.

    `first_ratio_error` is divided by `first_tokens` instead. `ratio_error` sums ratio - 1, and
    `ratio_error_squared` sums (ratio - 1)^2. Subtracting 1 reduces the rounding error of the
    ratio's variance.
    """

    tokens: float = 0.0
    policy_loss: float = 0.0
    value_loss: float = 0.0
    new_values: float = 0.0
    """Sum of the critic's values in the update."""

    entropy: float = 0.0
    approxkl: float = 0.0
    kl_from_old: float = 0.0
    """Sum of the k3 estimates of the KL divergence from the policy at sampling time."""

    kl_loss: float = 0.0
    clipped: float = 0.0
    value_clipped: float = 0.0
    ratio_error: float = 0.0
    abs_ratio_error: float = 0.0
    ratio_error_squared: float = 0.0
    first_tokens: float = 0.0
    first_ratio_error: float = 0.0
    """Sum of |ratio - 1| in the first optimizer step, where only rounding changes the ratio."""

    def add(self, other: "TokenSums") -> None:
        """Add the sums of another optimizer step."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


Record = TypeVar("Record", Rollout, Scores, Experience)


def map_tensors(record: Record, function: Callable[[Tensor], Tensor]) -> Record:
    """Return a copy of a record with `function` applied to each tensor, also in nested records."""
    return replace(
        record, **{name: _mapped(value, function) for name, value in vars(record).items()}
    )


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: function(tensor) for key, tensor in value.items()}
    return map_tensors(value, function) if isinstance(value, Rollout) else value
