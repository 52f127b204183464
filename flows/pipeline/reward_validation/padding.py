"""A text's score may not depend on what stands beside it in a batch, or on fillers."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.reward_validation.odd_texts import longest_row
from pipeline.reward_validation.rates import Array
from ppo_core.algorithm.logits import at_least_fp32
from ppo_core.data.batching import pad_rows
from ppo_core.models.reward_model import RewardModel


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two ways to score the same texts lie apart."""

    largest: float | None
    """Largest difference of a text's two scores; None if one of them is not finite."""

    share: float | None
    """The same as a share of the deviation of the scores of real texts; None too if they are all
    equal."""

    @classmethod
    def between(cls, one: Array, other: Array, deviation: float) -> "Difference":
        """The difference of scores (N,) and (N,)."""
        largest = float(np.abs(one - other).max())
        if not np.isfinite(largest):
            return cls(largest=None, share=None)
        return cls(largest=largest, share=largest / deviation if deviation else None)


def score_alone(model: RewardModel, rows: Sequence[list[int]]) -> Array:
    """Scores (N,) of token rows, each in a batch of its own."""
    return model.score_encoded(rows, 1).double().numpy()


def score_together(model: RewardModel, rows: Sequence[list[int]]) -> Array:
    """Scores (N,) of the same rows in one batch."""
    return model.score_encoded(rows, len(rows)).double().numpy()


def score_filled_right(model: RewardModel, rows: Sequence[list[int]]) -> Array:
    """Scores (N,) in one batch twice as wide as it must be, if the context has room for that."""
    ids, lengths = pad_rows(rows)
    room = max(longest_row(model) - ids.shape[1], 0)
    filler = torch.zeros(len(ids), min(ids.shape[1], room), dtype=torch.long)
    device = model.model.device
    scores = model.score_rows(torch.cat([ids, filler], dim=1).to(device), lengths.to(device))
    return scores.cpu().double().numpy()


@torch.no_grad()
def score_filled_left(model: RewardModel, rows: Sequence[list[int]]) -> Array | None:
    """Scores (N,) in one batch with fillers in front, hidden by a mask, places counted on.

    None where the model takes no places, which would count the fillers in; and for an encoder,
    which is read at its first place.
    """
    head, inner = model.lm_head, model.model.base_model
    takes_places = "position_ids" in inspect.signature(inner.forward).parameters
    if head is None or not takes_places:
        return None
    ids, lengths = pad_rows(rows, side="left")
    seen = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]
    inputs = {
        "input_ids": ids,
        "attention_mask": seen.long(),
        "position_ids": (seen.long().cumsum(dim=1) - 1).clamp(min=0),
    }
    places = {name: tensor.to(model.model.device) for name, tensor in inputs.items()}
    hidden = inner(**places, use_cache=False).last_hidden_state
    scores = (at_least_fp32(head(hidden[:, -1])[:, 0]) - model.bias) * model.gain
    return scores.cpu().double().numpy()
