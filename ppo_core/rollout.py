"""Prompts in, sampled responses out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.batches import length_sorted_batches
from ppo_core.decoding import begin_decoding
from ppo_core.errors import ModelError
from ppo_core.models import LanguageModel
from ppo_core.prompts import Tokens
from ppo_core.records import Rollout
from ppo_core.sampler import SamplingSettings, sample_tokens
from ppo_core.tensors import length_mask, pad_rows
from ppo_core.trunks import DecoderTrunk

KEPT_SHARE = 0.75
"""Ended responses leave the cache once no more than this share of its rows goes on: to move the
others together costs as much as a few passes."""


def decoder_of(policy: LanguageModel) -> DecoderTrunk:
    """The trunk of a policy that can be sampled from.

    Raises:
        ModelError: it has an encoder.
    """
    if not isinstance(policy.trunk, DecoderTrunk):
        raise ModelError(
            f"{type(policy.model).__name__} has an encoder, and only decoder-only models are "
            "sampled from here. Train it with ppo_core.classic, which generates by transformers."
        )
    return policy.trunk


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
) -> Rollout:
    """Sample one response to each prompt, ending at the stop token or after T tokens.

    uniforms is (B, T), one number in [0, 1) for each token that may be drawn. Prompts of
    similar length are sampled together, `batch_size` at a time, with a KV cache. On CPU and
    in fp32 the recorded log-probabilities equal those of a training pass to about 1e-6.

    Where each pass waits for all processes, `any_left` says whether one of them still has a
    response that goes on; all must have equally many prompts then. `pause` is called before each
    batch, and may raise.

    Raises:
        ModelError: the policy has an encoder.
    """
    trunk = decoder_of(policy)
    device = policy.device
    prompt_ids, prompt_lengths = pad_rows(prompts)
    decoded = _Decoded.empty(len(prompts), uniforms.shape[1], device)
    for batch in length_sorted_batches(prompt_lengths, batch_size):
        pause()
        part = _decode(
            policy,
            trunk,
            [prompts[i] for i in batch.tolist()],
            uniforms[batch].to(device),
            settings,
            any_left,
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


@dataclass(frozen=True)
class _Decoded:
    """Responses while they grow; columns as in `Rollout`."""

    ids: Tensor
    logprobs: Tensor
    behaviour_logprobs: Tensor
    lengths: Tensor
    has_stop: Tensor

    @classmethod
    def empty(cls, rows: int, most: int, device: torch.device) -> "_Decoded":
        return cls(
            ids=torch.zeros(rows, most, dtype=torch.long, device=device),
            logprobs=torch.zeros(rows, most, device=device),
            behaviour_logprobs=torch.zeros(rows, most, device=device),
            lengths=torch.full((rows,), most, device=device),
            has_stop=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def put(self, rows: Tensor, part: "_Decoded") -> None:
        for whole, of_rows in zip(vars(self).values(), vars(part).values(), strict=True):
            whole[rows] = of_rows


def _decode(
    policy: LanguageModel,
    trunk: DecoderTrunk,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    settings: SamplingSettings,
    any_left: Callable[[bool], bool] | None,
) -> _Decoded:
    """The responses to one batch of prompts."""
    most, device = uniforms.shape[1], policy.device
    decoded = _Decoded.empty(len(prompts), most, device)
    decoding = begin_decoding(policy, trunk, prompts, room=most, apart=any_left is None)
    next_logits = policy.logits_of_rows(len(prompts), passes=most)
    rows = torch.arange(len(prompts), device=device)  # the response at each row of the decoding
    going = torch.ones_like(rows, dtype=torch.bool)
    for t in range(most):
        chosen, logprobs, behaviour = sample_tokens(
            next_logits(decoding.states), uniforms[rows, t], settings
        )
        own = rows[going]
        decoded.ids[own, t] = chosen[going]
        decoded.logprobs[own, t] = logprobs[going]
        decoded.behaviour_logprobs[own, t] = behaviour[going]
        ends = going & (chosen == settings.stop_token_id)
        decoded.lengths[rows[ends]] = t + 1
        decoded.has_stop[rows[ends]] = True
        going &= ~ends
        left = int(going.sum())
        if t + 1 == most or not (any_left(left > 0) if any_left else left):
            break
        if left <= KEPT_SHARE * len(rows):
            # A row goes on without a response where passes are made for other processes.
            kept = going.nonzero()[:, 0] if left else torch.zeros_like(rows[:1])
            decoding.keep(kept)
            rows, going, chosen = rows[kept], going[kept], chosen[kept]
        decoding.step(chosen)
    return decoded
