"""Check the tensors that a script passes to a classic step, and make a rollout from them."""

from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from ppo_core.data.batching import pad_rows
from ppo_core.data.types import Rollout
from ppo_core.errors import DataError

Masks = Sequence[Tensor] | None
"""Mask (T,) of each response, True for counted tokens; None counts all tokens."""


def check_vectors(name: str, vectors: Sequence[Tensor]) -> None:
    """Raise DataError unless each vector is a tensor (length,) with at least one token."""
    for number, vector in enumerate(vectors):
        if not isinstance(vector, Tensor) or vector.ndim != 1 or len(vector) == 0:
            shape = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            raise DataError(
                f"{name} {number} must be a tensor (length,) of at least one token id, but is "
                f"{shape}."
            )


def check_scores(scores: Sequence[Tensor | float], batch_size: int) -> Tensor:
    """Return the scores as a tensor (B,) on the CPU, without a check for non-finite scores.

    Raises:
        DataError: the number of scores is not `batch_size`, or a score is neither a number nor a
            tensor () or (1,).
    """
    _check_count("score", scores, batch_size)
    for number, score in enumerate(scores):
        is_number = isinstance(score, Real | Tensor | np.ndarray)
        if not is_number or getattr(score, "shape", ()) not in ((), (1,)):
            raise DataError(
                f"Score {number} is {score!r:.80}. Pass one number per response, as a number or a "
                "tensor () or (1,)."
            )
    return torch.tensor(as_numbers(scores))


def as_numbers(scores: Sequence[Tensor | float]) -> list[float]:
    """Return scores as numbers, by `item` if possible: `float` refuses a NumPy array (1,)."""
    return [float(score.item() if hasattr(score, "item") else score) for score in scores]


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
    """Return a rollout of queries (P,) and responses (T,); its log-probabilities are set to 0.

    `start_token_id` is the first decoder input of an encoder-decoder model, else None. This token
    is removed from the start of responses, because `generate` adds it and the policy does not
    sample it.

    Raises:
        DataError: the number of queries, responses or masks is not `batch_size`, one of them is
            not a vector, or a mask does not fit its response.
    """
    for name, vectors in (("query", queries), ("response", responses), ("mask", masks)):
        if vectors is not None:
            _check_count(name, vectors, batch_size)
            check_vectors(name, vectors)
    masks = [torch.ones_like(response) for response in responses] if masks is None else masks
    starts = [start_token_id is not None and bool(ids[0] == start_token_id) for ids in responses]
    responses = [ids[start:] for ids, start in zip(responses, starts, strict=True)]
    masks = [mask[start:] for mask, start in zip(masks, starts, strict=True)]
    check_vectors("response", responses)
    _check_masks(responses, masks)
    prompt_ids, prompt_lengths = pad_rows([query.tolist() for query in queries])
    response_ids, lengths = pad_rows([response.tolist() for response in responses])
    response_mask, _ = pad_rows([mask.bool().tolist() for mask in masks])
    has_stop = [response[-1].item() == eos_token_id for response in responses]
    return Rollout(
        prompt_ids=prompt_ids.to(device),
        prompt_lengths=prompt_lengths.to(device),
        response_ids=response_ids.to(device),
        response_lengths=lengths.to(device),
        response_mask=response_mask.bool().to(device),
        has_stop=torch.tensor(has_stop, device=device),
        logprobs=torch.zeros(response_ids.shape, device=device),
        temperature=temperature,
    )


def _check_count(name: str, values: Sequence[object], batch_size: int) -> None:
    if len(values) != batch_size:
        raise DataError(
            f"step() got {len(values)} rows as {name}, but batch_size is {batch_size}. Pass full "
            "batches, or change batch_size."
        )


def _check_masks(responses: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    for number, (response, mask) in enumerate(zip(responses, masks, strict=True)):
        if len(mask) != len(response) or not mask.any():
            raise DataError(
                f"Mask {number} counts {int(mask.bool().sum())} of {len(mask)} tokens, for a "
                f"response of {len(response)} tokens. A mask must be as long as its response, and "
                "count at least one token."
            )
