"""Prompts in, sampled responses out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import length_sorted_batches, pad_rows
from ppo_core.data.prompts import Tokens
from ppo_core.data.types import Rollout
from ppo_core.errors import ModelError
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.continuous_batching import Decoded, Growing, Waiting
from ppo_core.rollout.sampler import SamplingSettings, sample_tokens
from ppo_core.rollout.transformers_decoder import begin_decoding, takes_more

KEPT_SHARE = 0.75
"""Ended responses leave the cache once no more than this share of its rows goes on, or one has all
tokens that it may, and prompts that wait take their places: to move the others together costs as
much as a few passes."""


def decoder_of(policy: LanguageModel) -> DecoderBackbone:
    """The backbone of a policy that can be sampled from.

    Raises:
        ModelError: it has an encoder.
    """
    if not isinstance(policy.backbone, DecoderBackbone):
        raise ModelError(
            f"{type(policy.model).__name__} has an encoder, and only decoder-only models are "
            "sampled from here. Train it with ppo_core.classic, which generates by transformers."
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
    any_left: Callable[[bool], bool] | None = None,
    pause: Callable[[], None] = lambda: None,
    ended: Callable[[int], None] = lambda number: None,
) -> Rollout:
    """Sample one response to each prompt, ending at the stop token or after T tokens.

    uniforms is (B, T), one number in [0, 1) for each token that may be drawn. At most `batch_size`
    prompts are sampled at a time, with a KV cache; the longest come first, and others take the
    places of responses that have ended. On CPU and in fp32 the recorded log-probabilities equal
    those of a training pass to about 1e-6.

    Where each pass waits for all processes, `any_left` says whether one of them still has a
    response that goes on; all must have equally many prompts then, which are sampled batch by
    batch. `pause` is called once for each `batch_size` prompts, before they are read, and may
    raise. `ended` is told how many more responses have ended.

    Raises:
        ModelError: the policy has an encoder, or does not keep keys and values by rows.
    """
    backbone = decoder_of(policy)
    device = policy.device
    prompt_ids, prompt_lengths = pad_rows(prompts)
    decoded = Decoded.empty(len(prompts), uniforms.shape[1], device)
    batches = length_sorted_batches(prompt_lengths, batch_size)
    if any_left is None and takes_more(policy, backbone):
        batches = [torch.cat(batches)]
    for batch in batches:
        part = _decode(
            policy,
            backbone,
            [prompts[i] for i in batch.tolist()],
            uniforms[batch].to(device),
            settings,
            batch_size=batch_size,
            any_left=any_left,
            pause=pause,
            ended=ended,
        )
        decoded.put(batch.to(device), part)
    return Rollout(
        prompt_ids=prompt_ids.to(device),
        prompt_lengths=prompt_lengths.to(device),
        response_ids=decoded.ids,
        response_lengths=decoded.lengths,
        response_mask=length_mask(decoded.lengths, uniforms.shape[1]),
        has_stop=decoded.has_stop,
        logprobs=decoded.logprobs,
        behaviour_logprobs=decoded.behaviour_logprobs if settings.is_restricted else None,
        temperature=settings.temperature,
    )


def _decode(
    policy: LanguageModel,
    backbone: DecoderBackbone,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    batch_size: int,
    any_left: Callable[[bool], bool] | None,
    pause: Callable[[], None],
    ended: Callable[[int], None],
) -> Decoded:
    """The responses to prompts, longest first, `batch_size` at a time."""
    most, device = uniforms.shape[1], policy.device
    decoded = Decoded.empty(len(prompts), most, device)
    waiting = Waiting(prompts, batch_size, pause)
    first = waiting.take(batch_size)
    decoding = begin_decoding(policy, backbone, first, most, apart=any_left is None)
    next_logits = policy.logits_of_rows(len(first), passes=most)
    growing, left = Growing.new(0, len(first), device), len(first)
    while True:
        drawn = uniforms[growing.number, growing.place]
        tokens, logprobs, behaviour = sample_tokens(next_logits(decoding.states), drawn, settings)
        ends = decoded.write(growing, tokens, logprobs, behaviour, settings.stop_token_id)
        growing = growing.after(ends, most)
        before, left, whole = left, *growing.count(most)
        ended(before - left)
        goes_on = any_left(left > 0) if any_left else left > 0 or len(waiting) > 0
        if not goes_on:
            return decoded
        if whole or left <= KEPT_SHARE * len(tokens):
            # A row goes on without a response where passes are made for other processes.
            kept = growing.rows(at_least=1 if any_left else 0)
            decoding.keep(kept)
            growing, tokens = growing.at(kept), tokens[kept]
        if len(tokens):
            decoding.step(tokens)
        if following := waiting.take(batch_size - len(tokens)):
            decoding.add(following)
            begun = Growing.new(waiting.begun - len(following), waiting.begun, device)
            growing, left = growing.and_then(begun), left + len(following)
