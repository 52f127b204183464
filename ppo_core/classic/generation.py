"""Sampling of responses for the classic loop, by transformers' `generate`."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows
from ppo_core.errors import ConfigError

_ONLY_NONE = (None,)
UNRESTRICTED: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "top_k": (0, None),
    "top_p": (1.0, None),
    "min_p": _ONLY_NONE,
    "top_h": _ONLY_NONE,
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
    "exponential_decay_length_penalty": _ONLY_NONE,
    "bad_words_ids": _ONLY_NONE,
    "suppress_tokens": _ONLY_NONE,
    "begin_suppress_tokens": _ONLY_NONE,
    "forced_bos_token_id": _ONLY_NONE,
    "forced_eos_token_id": _ONLY_NONE,
    "sequence_bias": _ONLY_NONE,
    "guidance_scale": _ONLY_NONE,
    "watermarking_config": _ONLY_NONE,
    "prompt_lookup_num_tokens": _ONLY_NONE,
    "return_dict_in_generate": (False, None),
}
"""Argument of `generate` -> values that leave the sampling distribution unchanged, default first.

With any other value, `generate` does not sample from the policy's distribution.
"""

OTHER_ENDS = {"stop_strings", "stopping_criteria", "max_time"}
"""Arguments that may end a response without an end token."""

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
"""Arguments that change length or speed, but not the distribution of tokens."""


def unrestricted(given: dict[str, Any], temperature: float) -> dict[str, Any]:
    """Return arguments with which `generate` samples from the policy's distribution.

    The returned arguments override the model's generation config, which may truncate sampling.

    Raises:
        ConfigError: an argument is unknown or changes the distribution. `step` would treat the
            responses as samples of the policy, and its estimate of the KL divergence could become
            negative (TRL #235, #256, #262).
    """
    harmless = {**UNRESTRICTED, "temperature": (temperature,)}
    for name, value in given.items():
        if name in LENGTH_AND_SPEED | OTHER_ENDS:
            continue
        if name not in harmless:
            raise ConfigError(
                f"{name}={value!r} is not an argument of generate() that is known to leave the "
                "policy's distribution unchanged. Leave the argument out, or call "
                "trainer.model.generate for responses that are not used in step()."
            )
        if value not in harmless[name]:
            raise ConfigError(
                f"{name}={value!r} would sample from another distribution than the policy, so "
                "step() would compute a wrong KL divergence. Leave the argument out, or call "
                "trainer.model.generate for responses that are not used in step(). The "
                "temperature is a setting of PPOConfig."
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
    """Return a response to each query (P,), cut after the response's first token in `ends`.

    With `return_prompt`, each response is prefixed by its query. An encoder-decoder model ignores
    return_prompt, and its responses begin with the decoder's start token, as in transformers.
    `length_sampler` draws max_new_tokens for each batch of `batch_size` queries.
    """
    if OTHER_ENDS & arguments.keys():
        # In larger batches, padding would follow such a response without an end token between.
        batch_size = 1
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    generate = _after_encoder if has_encoder else _after_prompt
    responses: list[Tensor] = []
    for start in range(0, len(queries), batch_size):
        if length_sampler is not None:
            arguments = {**arguments, "max_new_tokens": length_sampler()}
        batch = queries[start : start + batch_size]
        generated = generate(model, batch, pad_token_id, arguments)
        for query, sequence in zip(batch, generated, strict=True):
            response = _up_to_end(sequence, ends, start=int(has_encoder))
            joined = return_prompt and not has_encoder
            responses.append(torch.cat([query.to(sequence), response]) if joined else response)
    return responses


def _after_prompt(
    model: Any, queries: Sequence[Tensor], pad_token_id: int, arguments: dict[str, Any]
) -> Tensor:
    """Return responses (B, T) to left-padded queries."""
    ids, lengths = pad_rows([query.tolist() for query in queries], side="left")
    mask = length_mask(lengths, ids.shape[1]).flip(1)
    return _generate(model, ids, mask, pad_token_id, arguments)[:, ids.shape[1] :]


def _after_encoder(
    model: Any, queries: Sequence[Tensor], pad_token_id: int, arguments: dict[str, Any]
) -> Tensor:
    """Return the decoder's start token followed by the response, (B, 1 + T), for each query."""
    ids, lengths = pad_rows([query.tolist() for query in queries])
    return _generate(model, ids, length_mask(lengths, ids.shape[1]), pad_token_id, arguments)


@torch.no_grad()
def _generate(
    model: Any, ids: Tensor, mask: Tensor, pad_token_id: int, arguments: dict[str, Any]
) -> Tensor:
    generated: Tensor = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.long().to(model.device),
        pad_token_id=pad_token_id,
        **arguments,
    )
    return generated


def _up_to_end(sequence: Tensor, ends: Collection[int], *, start: int) -> Tensor:
    found = torch.isin(sequence[start:], sequence.new_tensor(list(ends))).nonzero()[:, 0]
    return sequence[: start + int(found[0]) + 1] if len(found) else sequence
