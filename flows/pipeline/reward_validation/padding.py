"""Score texts alone, in a batch, and with padding on either side."""

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.pair_accuracy import Array
from pipeline.results.reward_report import Difference
from pipeline.reward_validation.odd_texts import longest_row
from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.data.batching import pad_rows
from ppo_core.errors.out_of_memory import BatchSize
from ppo_core.models.reward_model import RewardModel


def difference_between(one: Array, other: Array, deviation: float) -> Difference:
    """Compare scores `one` (N,) with scores `other` (N,) of the same texts.

    `deviation` is the standard deviation of the scores of real texts.
    """
    largest = float(np.abs(one - other).max())
    if not np.isfinite(largest):
        return Difference(largest=None, share=None)
    return Difference(largest=largest, share=largest / deviation if deviation else None)


def score_alone(model: RewardModel, rows: Sequence[list[int]]) -> Array:
    """Return the scores (N,) of token rows, each in its own batch."""
    return _scores(model, rows, 1)


def score_together(model: RewardModel, rows: Sequence[list[int]]) -> Array:
    """Return the scores (N,) of token rows in one batch."""
    return _scores(model, rows, len(rows))


def _scores(model: RewardModel, rows: Sequence[list[int]], batch_size: int) -> Array:
    scores: Array = model.score_encoded(rows, batch_size).double().numpy()
    return scores


def score_right_padded(model: RewardModel, rows: Sequence[list[int]]) -> Array:
    """Return the scores (N,) in one batch, right-padded to twice the width of the longest row.

    The padded width is at most `longest_row`.
    """
    ids, lengths = pad_rows(rows)
    capacity = max(longest_row(model) - ids.shape[1], 0)
    padding = torch.zeros(len(ids), min(ids.shape[1], capacity), dtype=torch.long)
    ids, device = torch.cat([ids, padding], dim=1), model.model.device
    return _in_batches(
        lambda batch: model.score_rows(ids[batch].to(device), lengths[batch].to(device)), len(rows)
    )


@torch.no_grad()
def score_left_padded(model: RewardModel, rows: Sequence[list[int]]) -> Array | None:
    """Return the scores (N,) in one left-padded batch with a mask and position ids.

    Return None for a model without the argument `position_ids`, because such a model would count
    padding as positions. Also return None for an encoder, whose first position gives its score.
    """
    head, inner = model.lm_head, model.model.base_model
    takes_positions = "position_ids" in inspect.signature(inner.forward).parameters
    if head is None or not takes_positions:
        return None
    ids, lengths = pad_rows(rows, side="left")
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]
    inputs = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0),
    }
    device = model.model.device

    def score(batch: slice) -> Tensor:
        of_batch = {name: tensor[batch].to(device) for name, tensor in inputs.items()}
        hidden = inner(**of_batch, use_cache=False).last_hidden_state
        return (at_least_fp32(head(hidden[:, -1])[:, 0]) - model.bias) * model.gain

    return _in_batches(score, len(rows))


def _in_batches(score: Callable[[slice], Tensor], num_rows: int) -> Array:
    """Return the scores (N,) of padded rows, in one batch, or in smaller ones if memory is full.

    `score` takes the rows of a batch.
    """

    def scored(size: int) -> Tensor:
        starts = range(0, num_rows, size)
        return torch.cat([score(slice(start, start + size)).cpu() for start in starts])

    scores: Array = BatchSize(num_rows, "scoring").run(scored).double().numpy()
    return scores
