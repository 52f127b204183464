"""Prompts in, sampled responses out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.batches import length_sorted_batches
from ppo_core.decoding import begin_decoding, takes_more
from ppo_core.errors import ModelError
from ppo_core.models import LanguageModel
from ppo_core.prompts import Tokens
from ppo_core.records import Rollout
from ppo_core.sampler import SamplingSettings, sample_tokens
from ppo_core.tensors import length_mask, pad_rows
from ppo_core.trunks import DecoderTrunk

KEPT_SHARE = 0.75
"""Ended responses leave the cache once no more than this share of its rows goes on, or one has all
tokens that it may, and prompts that wait take their places: to move the others together costs as
much as a few passes."""


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
    raise. `ended` is told how many responses have ended.

    Raises:
        ModelError: the policy has an encoder.
    """
    trunk = decoder_of(policy)
    device = policy.device
    prompt_ids, prompt_lengths = pad_rows(prompts)
    decoded = _Decoded.empty(len(prompts), uniforms.shape[1], device)
    batches = length_sorted_batches(prompt_lengths, batch_size)
    if any_left is None and takes_more(policy, trunk):
        batches = [torch.cat(batches)]
    for batch in batches:
        part = _decode(
            policy,
            trunk,
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


class _Waiting:
    """Prompts that are not yet read, in the order in which they will be."""

    def __init__(
        self, prompts: Sequence[Tokens], batch_size: int, pause: Callable[[], None]
    ) -> None:
        self._prompts = prompts
        self._batch_size = batch_size
        self._pause = pause
        self.begun = 0

    def __len__(self) -> int:
        return len(self._prompts) - self.begun

    def take(self, most: int) -> Sequence[Tokens]:
        """The next ones, with a pause where they are the first of a batch.

        So there are as many in all processes, which may wait for each other in it.
        """
        following = self._prompts[self.begun : self.begun + most]
        end = self.begun + len(following)
        if math.ceil(end / self._batch_size) > math.ceil(self.begun / self._batch_size):
            self._pause()
        self.begun = end
        return following


@dataclass(frozen=True)
class _Growing:
    """The responses that grow, one at each row of the decoding."""

    number: Tensor
    """(b,) which of all responses it is."""

    place: Tensor
    """(b,) of its next token."""

    goes_on: Tensor
    """(b,) False where it has ended, and another may take its row."""

    @classmethod
    def new(cls, first: int, last: int, device: torch.device) -> "_Growing":
        number = torch.arange(first, last, device=device)
        return cls(number, torch.zeros_like(number), torch.ones_like(number, dtype=torch.bool))

    def after(self, ends: Tensor, most: int) -> "_Growing":
        """A token later, which was the last of some."""
        place = self.place + 1
        return _Growing(self.number, place, self.goes_on & ~ends & (place < most))

    def count(self, most: int) -> tuple[int, int]:
        """How many go on, and how many have all tokens that they may."""
        # Together, since each waits for the device.
        on, whole = torch.stack([self.goes_on.sum(), (self.place == most).sum()]).tolist()
        return on, whole

    def rows(self, *, at_least: int) -> Tensor:
        """The rows (b,) that go on, or so many others if there are none."""
        rows = self.goes_on.nonzero()[:, 0]
        return rows if len(rows) else rows.new_zeros(at_least)

    def at(self, rows: Tensor) -> "_Growing":
        return _Growing(*(tensor[rows] for tensor in vars(self).values()))

    def and_then(self, others: "_Growing") -> "_Growing":
        both = zip(vars(self).values(), vars(others).values(), strict=True)
        return _Growing(*(torch.cat(pair) for pair in both))


@dataclass(frozen=True)
class _Decoded:
    """Responses so far; columns as in `Rollout`."""

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

    def write(
        self, growing: _Growing, tokens: Tensor, logprobs: Tensor, behaviour: Tensor, stop: int
    ) -> Tensor:
        """Write the next token (b,) of each response that goes on; True where it is the stop."""
        going = growing.goes_on
        number, place = growing.number[going], growing.place[going]
        self.ids[number, place] = tokens[going]
        self.logprobs[number, place] = logprobs[going]
        self.behaviour_logprobs[number, place] = behaviour[going]
        ends = going & (tokens == stop)
        self.lengths[growing.number[ends]] = growing.place[ends] + 1
        self.has_stop[growing.number[ends]] = True
        return ends


def _decode(
    policy: LanguageModel,
    trunk: DecoderTrunk,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    batch_size: int,
    any_left: Callable[[bool], bool] | None,
    pause: Callable[[], None],
    ended: Callable[[int], None],
) -> _Decoded:
    """The responses to prompts, longest first, `batch_size` at a time."""
    most, device = uniforms.shape[1], policy.device
    decoded = _Decoded.empty(len(prompts), most, device)
    waiting = _Waiting(prompts, batch_size, pause)
    first = waiting.take(batch_size)
    decoding = begin_decoding(policy, trunk, first, most, apart=any_left is None)
    next_logits = policy.logits_of_rows(len(first), passes=most)
    growing, left = _Growing.new(0, len(first), device), len(first)
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
            begun = _Growing.new(waiting.begun - len(following), waiting.begun, device)
            growing, left = growing.and_then(begun), left + len(following)
