"""Sampling of responses for the classic loop, by transformers' `generate`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows
from ppo_core.errors import ConfigError
from ppo_core.rollout.token_sampling import NO_STOP_TOKEN, SamplingSettings

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "min_p": (None,),
    "top_h": (None,),
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "min_length": (0, -1, None),
    "min_new_tokens": (None, 0, -1),
    "num_beams": (1, None),
    "repetition_penalty": (1.0, None),
    "encoder_repetition_penalty": (1.0, None),
    "no_repeat_ngram_size": (0, None),
    "encoder_no_repeat_ngram_size": (0, None),
    "exponential_decay_length_penalty": (None,),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None,),
    "guidance_scale": (None,),
    "watermarking_config": (None,),
    "prompt_lookup_num_tokens": (None,),
}
"""Argument of `generate` -> values that keep the policy's own distribution.

The first value is the default."""

ONE_SEQUENCE: dict[str, tuple[Any, ...]] = {
    "num_return_sequences": (1, None),
    "return_dict_in_generate": (False, None),
}
"""Argument of `generate` -> values for which the result is one sequence per query."""

OTHER_ENDS = {"stop_strings", "stopping_criteria", "max_time"}
"""Arguments that may end a response without an end token."""

SAME_DISTRIBUTION = {
    "max_new_tokens",
    "max_length",
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "pad_token_id",
    "tokenizer",
    "use_cache",
    "cache_implementation",
    "output_attentions",
    "output_hidden_states",
    "synced_gpus",
    "_from_model_config",
}
"""Arguments that do not change the distribution of tokens; a model's saved generation_config has
several of them."""


@dataclass(frozen=True)
class Generation:
    """Arguments of transformers' `generate`, and the distribution that `generate` samples from."""

    arguments: dict[str, Any]
    """All arguments; they override the model's generation config."""

    settings: SamplingSettings
    """Temperature, top_k and top_p, which `step` accounts for."""

    unaccounted: list[str]
    """Arguments, as "name=value", that `step` does not account for."""

    @classmethod
    def of(cls, given: dict[str, Any], temperature: float) -> "Generation":
        """Read the arguments of a script; `temperature` is the default temperature.

        Raises:
            ConfigError: an argument requests a dict, or several sequences per query, or the
                temperature of sampling is not above 0.
        """
        if (config := given.pop("generation_config", None)) is not None:
            given = {**config.to_diff_dict(), **given}
            given.pop("transformers_version", None)
        for name, values in ONE_SEQUENCE.items():
            if given.get(name, values[0]) not in values:
                raise ConfigError(
                    f"{name}={given[name]!r} is not supported: generate() returns one response, "
                    "as token ids, for each query. Leave the argument out."
                )
        if not given.get("do_sample", True):
            # The likeliest tokens are the same at any temperature.
            given = {name: value for name, value in given.items() if name != "temperature"}
        policy: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        chosen = policy | {name: given[name] for name in policy if given.get(name) is not None}
        if not chosen["temperature"] > 0:
            raise ConfigError(
                f"temperature={chosen['temperature']} must be above 0. For the likeliest tokens, "
                "set do_sample=False."
            )
        chosen["top_k"] = int(chosen["top_k"])
        neutral = {name for name, values in NEUTRAL.items() if given.get(name) in values}
        accounted = {*chosen, *ONE_SEQUENCE, *SAME_DISTRIBUTION, *OTHER_ENDS}
        others = {name: value for name, value in given.items() if name not in neutral}
        defaults = {name: values[0] for name, values in (NEUTRAL | ONE_SEQUENCE).items()}
        unaccounted = [name for name in others if name not in accounted]
        known = chosen
        if unaccounted:
            # The distribution is unknown, so step() assumes that the policy itself was sampled.
            known = policy if "do_sample" in others else {**chosen, "top_k": 0, "top_p": 1.0}
        return cls(
            {**defaults, **others, **chosen},
            SamplingSettings(stop_token_id=NO_STOP_TOKEN, **known),
            [f"{name}={others[name]!r:.40}" for name in unaccounted],
        )

    def warning(self, estimator: str) -> str | None:
        """Return a warning if the statistics of `step` on these responses are biased, else None."""
        if self.unaccounted:
            return (
                f"generate() samples with {', '.join(self.unaccounted)}, so the samples are not "
                "from the policy: step() takes the policy's own log-probabilities, as TRL does. "
                "The gradient and the KL divergence are then biased, and the divergence can become "
                "negative. Leave the argument out to sample from the policy."
            )
        if self.settings.is_restricted and estimator != "full":
            return (
                f"generate() samples with top_k={self.settings.top_k} and "
                f"top_p={self.settings.top_p}: step() corrects the loss, but the estimated KL "
                "divergence is biased, and can become negative. Set kl_penalty='full', or leave "
                "out top_k and top_p."
            )
        return None


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
        # In a larger batch, padding would follow the response without an end token between them.
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
