"""Sample responses to prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import length_sorted_batches, pad_rows
from ppo_core.data.prompts import Tokens
from ppo_core.data.types import Rollout
from ppo_core.errors import ModelError
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.continuous_batching import ActiveSequences, PromptQueue
from ppo_core.rollout.decoder import can_add_prompts, new_decoder
from ppo_core.rollout.decoding_check import OwnForward, choose_backend
from ppo_core.rollout.response_buffer import ResponseBuffer
from ppo_core.rollout.token_sampling import SamplingSettings, sample_tokens

MAX_KEPT_SHARE = 0.75
"""Largest fraction of active sequences at which finished responses are removed from the cache.
Removal costs as much as a few forward passes. At larger fractions, finished responses are removed
only if a sequence has the maximum length."""


@dataclass(frozen=True, kw_only=True)
class SamplingCallbacks:
    """Functions of the caller that are called during sampling."""

    any_active: Callable[[bool], bool] | None = None
    """Takes whether this process has an active response; returns whether any process has one.

    Needed if each forward pass waits for all processes, as with sharded weights. All processes must
    then have equally many prompts, and continuous batching is off."""

    before_batch: Callable[[], None] = lambda: None
    """Called before each batch of `batch_size` prompts is read; may raise to stop sampling."""

    on_finished: Callable[[int], None] = lambda number: None
    """Takes the number of responses that have just finished; called after each token."""


def decoder_of(policy: LanguageModel) -> DecoderBackbone:
    """Return the backbone of a policy that can be sampled from.

    Raises:
        ModelError: the policy has an encoder.
    """
    if not isinstance(policy.backbone, DecoderBackbone):
        raise ModelError(
            f"{type(policy.model).__name__} has an encoder, but this sampler supports only "
            "decoder-only models. Train this model with ppo_core.classic, which generates by "
            "transformers."
        )
    return policy.backbone


@torch.no_grad()
def sample_responses(
    policy: LanguageModel,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    batch_size: int,
    callbacks: SamplingCallbacks = SamplingCallbacks(),
) -> Rollout:
    """Sample one response to each prompt; a response ends at the stop token or after T tokens.

    `uniforms` (B, T) has one number in [0, 1) for each token that may be drawn. At most
    `batch_size` prompts are sampled at a time, the longest first, with a KV cache. Finished
    responses are replaced by further prompts (continuous batching), unless `any_active` is set or
    the model cannot add prompts. In fp32 on a CPU, the recorded log-probabilities differ by about
    1e-6 from the log-probabilities of a training forward pass.

    Raises:
        ModelError: the policy has an encoder, no backend reproduces the policy's own
            log-probabilities, or a log-probability is not finite.
    """
    backbone = decoder_of(policy)
    if not backbone.is_checked:
        choose_backend(policy, OwnForward.of(policy, prompts))
    device = policy.device
    prompt_ids, prompt_lengths = pad_rows(prompts)
    buffer = ResponseBuffer.empty(len(prompts), uniforms.shape[1], device)
    taken = 0
    for batch in _batches(policy, backbone, prompt_lengths, batch_size, callbacks):
        part = _sample_sorted(
            policy,
            backbone,
            [prompts[i] for i in batch.tolist()],
            uniforms[batch].to(device),
            settings,
            batch_size=batch_size,
            callbacks=callbacks,
            taken_before=taken,
        )
        # Processes that wait for each other must call `before_batch` equally often, so each batch
        # counts as a full one.
        taken += len(batch) if callbacks.any_active is None else batch_size
        buffer.put(batch.to(device), part)
    response_mask = length_mask(buffer.lengths, uniforms.shape[1])
    _require_finite(buffer.logprobs, response_mask)
    return Rollout(
        prompt_ids=prompt_ids.to(device),
        prompt_lengths=prompt_lengths.to(device),
        response_ids=buffer.ids,
        response_lengths=buffer.lengths,
        response_mask=response_mask,
        has_stop=buffer.has_stop,
        logprobs=buffer.logprobs,
        behavior_logprobs=buffer.behavior_logprobs if settings.is_restricted else None,
        temperature=settings.temperature,
    )


def _require_finite(logprobs: Tensor, response_mask: Tensor) -> None:
    """Raise if a log-probability (B, T) is not finite: its token is not a sample of the policy."""
    broken = int((~logprobs.isfinite() & response_mask).any(dim=1).sum())
    if broken:
        raise ModelError(
            f"{broken} of {len(logprobs)} sampled responses have a log-probability that is not "
            "finite, so their tokens are arbitrary. The policy's weights contain NaN, or its "
            "activations overflow. Check the checkpoint of the policy for values that are not "
            "finite, or set bf16=False."
        )


def _batches(
    policy: LanguageModel,
    backbone: DecoderBackbone,
    lengths: Tensor,
    batch_size: int,
    callbacks: SamplingCallbacks,
) -> Iterator[Tensor]:
    """Yield batches of indices of prompts, longest prompts first."""
    batches = length_sorted_batches(lengths, batch_size)
    if not backbone.pads_prompts:
        yield from _batches_of_one_length(lengths, batch_size, callbacks)
    elif callbacks.any_active is None and can_add_prompts(policy, backbone):
        yield torch.cat(batches)
    else:
        yield from batches


def _batches_of_one_length(
    lengths: Tensor, batch_size: int, callbacks: SamplingCallbacks
) -> Iterator[Tensor]:
    """Yield batches of indices of prompts with equal length.

    A process with few different lengths has fewer batches than other processes, but all processes
    must run the same number of passes. Such a process therefore yields one prompt repeatedly until
    all processes have finished.
    """
    batches = [
        part
        for length in lengths.unique().flip(0)
        for part in (lengths == length).nonzero()[:, 0].split(batch_size)
    ]
    if callbacks.any_active is None:
        yield from batches
        return
    number = 0
    while callbacks.any_active(number < len(batches)):
        yield batches[number] if number < len(batches) else batches[0][:1]
        number += 1


def _sample_sorted(
    policy: LanguageModel,
    backbone: DecoderBackbone,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    batch_size: int,
    callbacks: SamplingCallbacks,
    taken_before: int,
) -> ResponseBuffer:
    """Sample responses to prompts that are sorted longest first, at most `batch_size` at a time."""
    max_new_tokens, device = uniforms.shape[1], policy.device
    any_active = callbacks.any_active
    buffer = ResponseBuffer.empty(len(prompts), max_new_tokens, device)
    queue = PromptQueue(prompts, batch_size, callbacks.before_batch, taken_before=taken_before)
    first = queue.take(batch_size)
    decoder = new_decoder(
        policy, backbone, first, max_new_tokens, splits_prompts=any_active is None
    )
    logits_of = policy.logits_of_rows(len(first), passes=max_new_tokens)
    active, num_active = ActiveSequences.new(0, len(first), device), len(first)
    while True:
        drawn = uniforms[active.response, active.position]
        tokens, logprobs, behavior = sample_tokens(logits_of(decoder.states), drawn, settings)
        is_stop = buffer.write(active, tokens, logprobs, behavior, settings.stop_token_id)
        active = active.advance(is_stop, max_new_tokens)
        num_before, (num_active, num_full) = num_active, active.count(max_new_tokens)
        callbacks.on_finished(num_before - num_active)
        if any_active is not None:
            continues = any_active(num_active > 0)
        else:
            continues = num_active > 0 or len(queue) > 0
        if not continues:
            return buffer
        few = num_full or num_active <= MAX_KEPT_SHARE * len(tokens)
        if few and decoder.drops_sequences:
            # While other processes sample, one finished sequence takes part in their passes.
            kept = active.active_sequences(at_least=0 if any_active is None else 1)
            decoder.keep(kept)
            active, tokens = active.select(kept), tokens[kept]
        if len(tokens):
            decoder.step(tokens)
        if further := queue.take(batch_size - len(tokens)):
            decoder.add(further)
            begun = ActiveSequences.new(queue.num_taken - len(further), queue.num_taken, device)
            active, num_active = active.extend(begun), num_active + len(further)
