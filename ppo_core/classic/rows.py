"""The rows that a script hands to a classic step: checked, and made into a rollout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_core.data.batching import pad_rows
from ppo_core.data.types import Rollout
from ppo_core.errors import DataError

Masks = Sequence[Tensor] | None
"""A mask (T,) of each response, or None where all tokens count."""


def check_vectors(name: str, rows: Sequence[Tensor]) -> None:
    """Refuse rows that are no token ids (length,).

    Raises:
        DataError: a row is no tensor of one dimension, or empty.
    """
    for number, row in enumerate(rows):
        if not isinstance(row, Tensor) or row.ndim != 1 or len(row) == 0:
            shape = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
            raise DataError(
                f"{name} {number} must be a tensor (length,) of token ids, at least one; it is "
                f"{shape}."
            )


def check_scores(scores: Sequence[Tensor | float], batch_size: int) -> Tensor:
    """The scores (B,), on the CPU; what is no number stays in it.

    Raises:
        DataError: there are too few or too many, or one of them is several.
    """
    _check_count("score", scores, batch_size)
    for number, score in enumerate(scores):
        if isinstance(score, Tensor) and score.numel() != 1:
            raise DataError(
                f"Score {number} is a tensor {tuple(score.shape)}; a response has one number."
            )
    return torch.tensor([float(score) for score in scores])


def make_rollout(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    masks: Masks,
    *,
    batch_size: int,
    start_token_id: int | None,
    eos_token_id: int | None,
    temperature: float,
    device: torch.device,
) -> Rollout:
    """Queries (P,) and responses (T,) as a rollout whose log-probabilities are still 0.

    A response that begins with `start_token_id`, that of a decoder beside an encoder, is taken
    without it: it is what `generate` begins with, and no choice of the policy.

    Raises:
        DataError: there are not `batch_size` rows, or one cannot be used.
    """
    counted = [torch.ones_like(row) for row in responses] if masks is None else masks
    for name, rows in (("query", queries), ("response", responses), ("mask", counted)):
        _check_count(name, rows, batch_size)
        check_vectors(name, rows)
    begins = [start_token_id is not None and bool(row[0] == start_token_id) for row in responses]
    responses = [row[begin:] for row, begin in zip(responses, begins, strict=True)]
    counted = [row[begin:] for row, begin in zip(counted, begins, strict=True)]
    check_vectors("response", responses)
    _check_masks(responses, counted)
    prompt_ids, prompt_lengths = pad_rows([row.tolist() for row in queries])
    response_ids, lengths = pad_rows([row.tolist() for row in responses])
    mask, _ = pad_rows([row.bool().tolist() for row in counted])
    ends = [row[-1].item() == eos_token_id for row in responses]
    return Rollout(
        prompt_ids=prompt_ids.to(device),
        prompt_lengths=prompt_lengths.to(device),
        response_ids=response_ids.to(device),
        response_lengths=lengths.to(device),
        response_mask=mask.bool().to(device),
        has_stop=torch.tensor(ends, device=device),
        logprobs=torch.zeros(response_ids.shape, device=device),
        temperature=temperature,
    )


def _check_count(name: str, rows: Sequence[object], batch_size: int) -> None:
    if len(rows) != batch_size:
        raise DataError(
            f"step() got {len(rows)} rows of {name}, and batch_size is {batch_size}. Hand over "
            "whole batches, or set batch_size."
        )


def _check_masks(responses: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    for number, (response, mask) in enumerate(zip(responses, masks, strict=True)):
        if len(mask) != len(response) or not mask.any():
            raise DataError(
                f"Mask {number} counts {int(mask.bool().sum())} of {len(mask)} tokens, for a "
                f"response of {len(response)}: it must be as long and count at least one."
            )
