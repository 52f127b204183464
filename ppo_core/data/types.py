"""What one phase of a PPO step hands to the next. Shapes as in `tensors`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_core.algorithm.masking import length_mask


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Prompts and the responses that the policy sampled for them."""

    prompt_ids: Tensor
    """(B, P) token ids, filled up on the right."""

    prompt_lengths: Tensor
    """(B,) tokens of each prompt."""

    response_ids: Tensor
    """(B, T) token ids, filled up on the right."""

    response_lengths: Tensor
    """(B,) tokens of each response, the stop token included; at least 1."""

    has_stop: Tensor
    """(B,) True where the response ends in the stop token."""

    logprobs: Tensor
    """(B, T) log-probability of each token when it was sampled; 0 where not counted."""

    temperature: float
    """The temperature it was sampled at."""

    response_mask: Tensor
    """(B, T) True for the tokens that count, the stop token included: the one mask of the step."""

    behaviour_logprobs: Tensor | None = None
    """(B, T) log-probabilities under the distribution that was drawn from, where top_k, top_p or
    another engine's rounding made it another than the policy's; None where it is the policy's."""

    def __len__(self) -> int:
        """Responses in this rollout."""
        return len(self.response_ids)

    @property
    def row_lengths(self) -> Tensor:
        """(B,) tokens of prompt and response together."""
        return self.prompt_lengths + self.response_lengths

    def token_rows(self, rows: Tensor) -> "TokenRows":
        """Prompt and response of some rows joined, without a gap between them."""
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
        place = prompt_lengths[row] + t
        return TokenRows(
            ids=ids,
            lengths=lengths,
            prompt_lengths=prompt_lengths,
            row=row,
            state=place - 1,
            targets=ids[row, place],
        )


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Joined rows, and where in them the N counted tokens are, row by row."""

    ids: Tensor
    """(B, S) token ids, filled up on the right."""

    lengths: Tensor
    """(B,) tokens of each row."""

    prompt_lengths: Tensor
    """(B,) tokens of each prompt."""

    row: Tensor
    """(N,) the row of each counted token."""

    state: Tensor
    """(N,) the place before each counted token: the state that the token was sampled in."""

    targets: Tensor
    """(N,) the counted tokens themselves."""

    def to(self, device: torch.device) -> "TokenRows":
        """The same on another device."""
        return TokenRows(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What reference, critic and reward model say about a rollout."""

    ref_logprobs: Tensor
    """(B, T) log-probabilities under the reference; 0 where not counted."""

    values: Tensor
    """(B, T) the critic's value of the state before each token; 0 where not counted."""

    scores: Tensor
    """(B,) what each response is worth."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    """(B,) by the name of each reward, where there are several."""

    full_kl: Tensor | None = None
    """(B, T) exact KL divergence at each counted token, where that is asked for."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What the update learns from."""

    rollout: Rollout
    values: Tensor
    """(B, T) values at sampling time."""

    ref_logprobs: Tensor
    """(B, T) log-probabilities under the reference, for a divergence in the loss."""

    kl_loss_coef: float = 0.0
    """Weight of that divergence in the loss."""

    advantages: Tensor
    """(B, T) advantages, standardised if the settings say so."""

    returns: Tensor
    """(B, T) what the critic is to predict: advantages before standardising, plus values."""


@dataclass(kw_only=True)
class TokenSums:
    """Sums over counted tokens of an update; divided by `tokens` they are its means.

    `ratio_error` and its square are of ratio - 1, whose spread would drown in that of the ratio.
    """

    tokens: float = 0.0
    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    approxkl: float = 0.0
    kl_from_old: float = 0.0
    """k3 estimate of the divergence from the policy that sampled."""

    kl_loss: float = 0.0
    clipped: float = 0.0
    value_clipped: float = 0.0
    ratio_error: float = 0.0
    abs_ratio_error: float = 0.0
    ratio_error_squared: float = 0.0
    first_tokens: float = 0.0
    first_ratio_error: float = 0.0
    """|ratio - 1| in the first optimizer step, before the policy has moved: rounding alone."""

    def add(self, other: "TokenSums") -> None:
        """Add the sums of one more optimizer step."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


Record = TypeVar("Record", Rollout, Scores, Experience)


def map_tensors(record: Record, function: Callable[[Tensor], Tensor]) -> Record:
    """The same record with `function` of each of its tensors, those of its parts included."""
    return replace(
        record, **{name: _mapped(value, function) for name, value in vars(record).items()}
    )


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: function(tensor) for key, tensor in value.items()}
    return map_tensors(value, function) if isinstance(value, Rollout) else value
