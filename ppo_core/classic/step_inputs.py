"""The tensors that a script passes to a classic step: check them, and build a rollout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_core.data.batching import pad_rows
from ppo_core.data.types import Rollout
from ppo_core.errors import DataError

Masks = Sequence[Tensor] | None
"""A mask (T,) for each response; None if all tokens count."""


def check_vectors(name: str, vectors: Sequence[Tensor]) -> None:
    """Raise DataError unless each vector is a tensor (length,) with at least one element."""
    for number, vector in enumerate(vectors):
        if not isinstance(vector, Tensor) or vector.ndim != 1 or len(vector) == 0:
            shape = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            raise DataError(
                f"{name} {number} must be a tensor (length,) of token ids, at least one; it is "
                f"{shape}."
            )


def check_scores(scores: Sequence[Tensor | float], batch_size: int) -> Tensor:
    """Return the scores (B,) on the CPU; values that are not finite are kept.

    Raises:
        DataError: there are not `batch_size` scores, or one is a tensor of several numbers.
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
    """Return a rollout of queries (P,) and responses (T,), with log-probabilities of 0.

    `start_token_id` is the first decoder input of an encoder-decoder model. `generate` puts it
    before a response although the policy did not sample it, so it is removed.

    Raises:
        DataError: there are not `batch_size` queries, responses and masks; one is no vector; or
            a mask does not fit its response.
    """
    masks = [torch.ones_like(response) for response in responses] if masks is None else masks
    for name, vectors in (("query", queries), ("response", responses), ("mask", masks)):
        _check_count(name, vectors, batch_size)
        check_vectors(name, vectors)
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
            f"step() got {len(values)} rows of {name}, and batch_size is {batch_size}. Pass full "
            "batches, or set batch_size."
        )


def _check_masks(responses: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    for number, (response, mask) in enumerate(zip(responses, masks, strict=True)):
        if len(mask) != len(response) or not mask.any():
            raise DataError(
                f"Mask {number} counts {int(mask.bool().sum())} of {len(mask)} tokens, for a "
                f"response of {len(response)}: it must be as long as the response, and count at "
                "least one token."
            )
