"""Responses by transformers' `generate`, for the classic loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.errors import ConfigError
from ppo_core.tensors import length_mask, pad_rows

UNRESTRICTED: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "top_k": (0, None),
    "top_p": (1.0, None),
    "min_p": (None,),
    "typical_p": (1.0, None),
    "min_length": (-1, 0, None),
    "min_new_tokens": (0, -1, None),
    "num_beams": (1, None),
    "repetition_penalty": (1.0, None),
    "no_repeat_ngram_size": (0, None),
    "bad_words_ids": (None,),
    "logits_processor": (None,),
}
"""What leaves the policy as it is; anything else samples from another distribution."""


def unrestricted(given: dict[str, Any], temperature: float) -> dict[str, Any]:
    """Arguments of `generate` that sample from the policy itself.

    A model's own generation settings are overruled: they restrict, too.

    Raises:
        ConfigError: an argument restricts the sampling. `step` would take the responses for
            the policy's own, and its estimate of the KL divergence could turn negative
            (TRL #235, #256, #262).
    """
    for name, harmless in {**UNRESTRICTED, "temperature": (temperature,)}.items():
        if name in given and given[name] not in harmless:
            raise ConfigError(
                f"{name}={given[name]!r} samples from another distribution than the policy that "
                f"step() trains, and the KL divergence would be wrong. Leave it out (temperature "
                "is a setting), or generate with trainer.model.generate what is not trained on."
            )
    plain = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": temperature}
    plain |= {"repetition_penalty": 1.0, "num_beams": 1}
    kept = {name: value for name, value in given.items() if name not in UNRESTRICTED}
    return {**plain, **kept}


@torch.no_grad()
def generate_batch(
    model: nn.Module,
    queries: Sequence[Tensor],
    *,
    eos_token_id: int | None,
    pad_token_id: int,
    batch_size: int,
    return_prompt: bool,
    length_sampler: Callable[[], int] | None,
    arguments: dict[str, Any],
) -> list[Tensor]:
    """A response to each query (P,), up to and with its end-of-sequence token.

    With `return_prompt` the query stands before its response, unless the model has an encoder.
    """
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    responses: list[Tensor] = []
    for start in range(0, len(queries), batch_size):
        part = queries[start : start + batch_size]
        if length_sampler is not None:
            arguments = {**arguments, "max_new_tokens": length_sampler()}
        side = "right" if has_encoder else "left"
        ids, lengths = pad_rows([query.tolist() for query in part], side=side)
        seen = length_mask(lengths, ids.shape[1])
        if side == "left":
            seen = seen.flip(1)
        generated = model.generate(  # type: ignore[operator]
            input_ids=ids.to(model.device),
            attention_mask=seen.long().to(model.device),
            pad_token_id=pad_token_id,
            **arguments,
        )
        skipped = 1 if has_encoder else ids.shape[1]
        for query, row in zip(part, generated, strict=True):
            response = _up_to_end(row[skipped:], eos_token_id)
            whole = return_prompt and not has_encoder
            responses.append(torch.cat([query.to(row), response]) if whole else response)
    return responses


def _up_to_end(response: Tensor, eos_token_id: int | None) -> Tensor:
    ends = (response == eos_token_id).nonzero()[:, 0] if eos_token_id is not None else []
    return response[: int(ends[0]) + 1] if len(ends) else response
