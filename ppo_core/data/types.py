"""Records passed between the phases of a PPO step; dimensions as in `algorithm.masking`."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_core.algorithm.masking import length_mask

SumOverProcesses = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes; the identity for a single process."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Prompts and the responses that the policy sampled for them."""

    prompt_ids: Tensor
    """(B, P) token ids, right-padded."""

    prompt_lengths: Tensor
    """(B,) tokens of each prompt."""

    response_ids: Tensor
    """(B, T) token ids, right-padded."""

    response_lengths: Tensor
    """(B,) tokens of each response, the stop token included; at least 1."""

    has_stop: Tensor
    """(B,) True where the response ends in the stop token."""

    logprobs: Tensor
    """(B, T) log-probability of each token when it was sampled; 0 where not counted."""

    temperature: float
    """Sampling temperature."""

    response_mask: Tensor
    """(B, T) True for counted tokens, the stop token included; the only mask of the step."""

    behaviour_logprobs: Tensor | None = None
    """(B, T) log-probabilities under the sampling distribution, if it differs from the policy's
    through top_k, top_p or the rounding of another engine; else None."""

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self.response_ids)

    @property
    def row_lengths(self) -> Tensor:
        """Return the tokens (B,) of prompt and response together."""
        return self.prompt_lengths + self.response_lengths

    def token_rows(self, rows: Tensor) -> "TokenRows":
        """Return prompts and responses of the given rows, joined without padding between them."""
        prompt_lengths, responses = self.prompt_lengths[rows], self.response_ids[rows]
        lengths = self.row_lengths[rows]
        width = int(lengths.max())
        prompts = self.prompt_ids[rows][:, :width]
        ids = torch.nn.functional.pad(prompts, (0, width - prompts.shape[1]))
        ids = torch.where(length_mask(prompt_lengths, width), ids, 0)
        present = length_mask(self.response_lengths[rows], responses.shape[1])
        row, t = present.nonzero(as_tuple=True)
        ids[row, prompt_lengths[row] + t] = responses[row, t]
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
    """Sequences of prompt and response, and the positions of their N counted tokens."""

    ids: Tensor
    """(B, S) token ids, right-padded."""

    lengths: Tensor
    """(B,) tokens of each sequence."""

    prompt_lengths: Tensor
    """(B,) tokens of each prompt."""

    row: Tensor
    """(N,) the sequence of each counted token, in ascending order."""

    state: Tensor
    """(N,) the position before each counted token, whose hidden state the token was sampled
    from."""

    targets: Tensor
    """(N,) the counted tokens."""

    def to(self, device: torch.device) -> "TokenRows":
        """Return a copy on another device."""
        return TokenRows(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Outputs of reference, critic and reward model for a rollout."""

    ref_logprobs: Tensor
    """(B, T) log-probabilities under the reference; 0 where not counted."""

    values: Tensor
    """(B, T) the critic's value of the state before each token; 0 where not counted."""

    scores: Tensor
    """(B,) total score of each response."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    """Name -> scores (B,) of each reward function, if there are several."""

    full_kl: Tensor | None = None
    """(B, T) exact KL divergence at each counted token, if requested."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Training data of one update."""

    rollout: Rollout
    values: Tensor
    """(B, T) values at sampling time."""

    ref_logprobs: Tensor
    """(B, T) log-probabilities under the reference, for a KL divergence in the loss."""

    kl_loss_coef: float = 0.0
    """Weight of the KL divergence in the loss."""

    advantages: Tensor
    """(B, T) advantages, standardized if the settings say so."""

    returns: Tensor
    """(B, T) targets of the critic: advantages before standardization, plus values."""


@dataclass(kw_only=True)
class TokenSums:
    """Sums over the counted tokens of an update; divide by `tokens` for means.

    `ratio_error` and its square are sums of ratio - 1, for a numerically exact variance.
    """

    tokens: float = 0.0
    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    approxkl: float = 0.0
    kl_from_old: float = 0.0
    """k3 estimate of the KL divergence from the policy at sampling time."""

    kl_loss: float = 0.0
    clipped: float = 0.0
    value_clipped: float = 0.0
    ratio_error: float = 0.0
    abs_ratio_error: float = 0.0
    ratio_error_squared: float = 0.0
    first_tokens: float = 0.0
    first_ratio_error: float = 0.0
    """Sum of |ratio - 1| in the first optimizer step, where only rounding changes the ratio."""

    def add(self, **sums: Tensor | float) -> None:
        """Add the sums of one microbatch."""
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + float(value))

    def add_all(self, other: "TokenSums") -> None:
        """Add the sums of one optimizer step."""
        self.add(**vars(other))

    def summed(self, sum_over_processes: SumOverProcesses) -> "TokenSums":
        """Return the sums over all processes."""
        names = [entry.name for entry in fields(self)]
        own = torch.tensor([getattr(self, name) for name in names], dtype=torch.float64)
        return TokenSums(**dict(zip(names, sum_over_processes(own).tolist(), strict=True)))


Record = TypeVar("Record", Rollout, Scores, Experience)


def map_tensors(record: Record, function: Callable[[Tensor], Tensor]) -> Record:
    """Return a copy of a record with `function` applied to each tensor, nested ones included."""
    return replace(
        record, **{name: _mapped(value, function) for name, value in vars(record).items()}
    )


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: function(tensor) for key, tensor in value.items()}
    return map_tensors(value, function) if isinstance(value, Rollout) else value
