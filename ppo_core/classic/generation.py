"""Responses by transformers' `generate`, for the classic loop."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows
from ppo_core.errors import ConfigError

_OFF = (None,)
UNRESTRICTED: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "top_k": (0, None),
    "top_p": (1.0, None),
    "min_p": _OFF,
    "top_h": _OFF,
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "min_length": (0, -1, None),
    "min_new_tokens": (None, 0, -1),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "repetition_penalty": (1.0, None),
    "encoder_repetition_penalty": (1.0, None),
    "no_repeat_ngram_size": (0, None),
    "encoder_no_repeat_ngram_size": (0, None),
    "exponential_decay_length_penalty": _OFF,
    "bad_words_ids": _OFF,
    "suppress_tokens": _OFF,
    "begin_suppress_tokens": _OFF,
    "forced_bos_token_id": _OFF,
    "forced_eos_token_id": _OFF,
    "sequence_bias": _OFF,
    "guidance_scale": _OFF,
    "watermarking_config": _OFF,
    "prompt_lookup_num_tokens": _OFF,
    "return_dict_in_generate": (False, None),
}
"""What leaves the policy as it is, the value that is used first; others restrict it."""

OTHER_ENDS = {"stop_strings", "stopping_criteria", "max_time"}
"""What ends a response without a token that tells where."""

LENGTH_AND_SPEED = {
    "max_new_tokens",
    "max_length",
    "eos_token_id",
    "pad_token_id",
    "tokenizer",
    "use_cache",
    "cache_implementation",
    "synced_gpus",
}
"""What says how long a response may be and how it is computed, but not from what it is drawn."""


def unrestricted(given: dict[str, Any], temperature: float) -> dict[str, Any]:
    """Arguments of `generate` that sample from the policy itself.

    A model's own generation settings are overruled: they restrict, too.

    Raises:
        ConfigError: an argument restricts the sampling, or is unknown. `step` would take the
            responses for the policy's own, and its estimate of the KL divergence could turn
            negative (TRL #235, #256, #262).
    """
    harmless = {**UNRESTRICTED, "temperature": (temperature,)}
    for name, value in given.items():
        if name in LENGTH_AND_SPEED | OTHER_ENDS:
            continue
        if name not in harmless:
            raise ConfigError(
                f"{name}={value!r} is no argument of generate() that is known to leave the policy "
                "as it is. Leave it out, or generate with trainer.model.generate what is not "
                "trained on."
            )
        if value not in harmless[name]:
            raise ConfigError(
                f"{name}={value!r} samples from another distribution than the policy that "
                f"step() trains, and the KL divergence would be wrong. Leave it out (temperature "
                "is a setting), or generate with trainer.model.generate what is not trained on."
            )
    kept = {name: value for name, value in given.items() if name not in harmless}
    return {name: values[0] for name, values in harmless.items()} | kept


def generate_responses(
    model: nn.Module,
    queries: Sequence[Tensor],
    *,
    ends: Collection[int],
    pad_token_id: int,
    batch_size: int,
    return_prompt: bool,
    length_sampler: Callable[[], int] | None,
    arguments: dict[str, Any],
) -> list[Tensor]:
    """A response to each query (P,), up to and with the first of its tokens that is in `ends`.

    With `return_prompt` the query stands before its response. Not so for a model with an
    encoder, whose responses begin with the decoder's start token, as transformers has it.
    `length_sampler` draws the most new tokens of each `batch_size` queries.
    """
    if OTHER_ENDS & arguments.keys():
        # Rows that have ended are filled up with what looks like tokens, and nothing tells where.
        batch_size = 1
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    generate = _after_encoder if has_encoder else _after_prompt
    responses: list[Tensor] = []
    for start in range(0, len(queries), batch_size):
        if length_sampler is not None:
            arguments = {**arguments, "max_new_tokens": length_sampler()}
        part = queries[start : start + batch_size]
        for query, row in zip(part, generate(model, part, pad_token_id, arguments), strict=True):
            response = _up_to_end(row, ends, start=int(has_encoder))
            whole = return_prompt and not has_encoder
            responses.append(torch.cat([query.to(row), response]) if whole else response)
    return responses


def _after_prompt(
    model: Any, queries: Sequence[Tensor], pad_token_id: int, arguments: dict[str, Any]
) -> Tensor:
    """Responses (B, T); the queries are filled up on the left."""
    ids, lengths = pad_rows([query.tolist() for query in queries], side="left")
    seen = length_mask(lengths, ids.shape[1]).flip(1)
    return _generate(model, ids, seen, pad_token_id, arguments)[:, ids.shape[1] :]


def _after_encoder(
    model: Any, queries: Sequence[Tensor], pad_token_id: int, arguments: dict[str, Any]
) -> Tensor:
    """Start token and responses (B, 1 + T)."""
    ids, lengths = pad_rows([query.tolist() for query in queries])
    return _generate(model, ids, length_mask(lengths, ids.shape[1]), pad_token_id, arguments)


@torch.no_grad()
def _generate(
    model: Any, ids: Tensor, seen: Tensor, pad_token_id: int, arguments: dict[str, Any]
) -> Tensor:
    generated: Tensor = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=seen.long().to(model.device),
        pad_token_id=pad_token_id,
        **arguments,
    )
    return generated


def _up_to_end(row: Tensor, ends: Collection[int], *, start: int) -> Tensor:
    found = torch.isin(row[start:], row.new_tensor(list(ends))).nonzero()[:, 0]
    return row[: start + int(found[0]) + 1] if len(found) else row
