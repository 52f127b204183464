"""One token a row from logits: how it is drawn, and which one ends a response."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppo_core.algorithm.logits import at_least_fp32, tempered
from ppo_core.algorithm.top_k_top_p import truncated
from ppo_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_STOP_TOKEN = -1
"""No token has this id: responses run to their full length."""

BLOCK = 128
"""Tokens whose probabilities are summed first: a running sum over them alone is needed then."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn, and when a response ends."""

    stop_token_id: int
    temperature: float
    """0 takes the likeliest token, its log-probability that of temperature 1."""
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_restricted(self) -> bool:
        """Whether tokens are drawn from another distribution than the policy's."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def stop_token(
    tokenizer: "PreTrainedTokenizerBase", stop: str | None, stop_token_id: int | None
) -> int:
    """The token that ends a response: the id that is set, else end-of-sequence, else none.

    Raises:
        ModelError: end-of-sequence is asked for, and the tokenizer has no such token.
    """
    if stop_token_id is not None:
        return stop_token_id
    if stop is None:
        return NO_STOP_TOKEN
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "The policy's tokenizer has no end-of-sequence token: no response would ever end. "
            "Set stop_token_id, or stop_token=None."
        )
    return int(tokenizer.eos_token_id)


def sample_tokens(
    logits: Tensor, uniforms: Tensor, settings: SamplingSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature), cut to top_k and top_p.

    The token is the first whose cumulative probability exceeds `uniforms` (B,), numbers in
    [0, 1). With the randomness handed in, a row's token depends on nothing but the row:
    not on its neighbours, the batch size or the number of processes. The logits (B, V) may be
    overwritten.

    Returns ids (B,), their log-probabilities under the whole policy (B,), and those under
    the distribution that was drawn from (B,), which are the same tensor where nothing is cut.
    """
    if settings.temperature == 0:
        logprobs = torch.log_softmax(at_least_fp32(logits), dim=-1)
        chosen = logprobs.argmax(dim=-1)
        picked = _of(logprobs, chosen)
        return chosen, picked, picked
    scaled = tempered(logits, settings.temperature)
    if not settings.is_restricted:
        chosen, picked = _draw(scaled, uniforms)
        return chosen, picked, picked
    cut = truncated(scaled, top_k=settings.top_k, top_p=settings.top_p)
    normaliser = scaled.logsumexp(dim=-1)
    chosen, behaviour = _draw(cut, uniforms)
    return chosen, _of(scaled, chosen) - normaliser, behaviour


def _draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first token (B,) whose cumulative probability exceeds a number, and its log-probability.

    Its block of tokens comes first, then the token in it: a running sum over a whole vocabulary
    takes longer than the softmax. The logits (B, V) are overwritten.
    """
    rows, tokens = logits.shape
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    if missing := -tokens % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.view(rows, -1, BLOCK)
    cumulative = blocks.sum(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1]
    block, before = _first_beyond(cumulative, uniforms * total)
    inside = blocks[torch.arange(rows, device=block.device), block].cumsum(dim=-1)
    token, _ = _first_beyond(inside, uniforms * total - before)
    chosen = block * BLOCK + token
    return chosen, _of(weights, chosen).log() - total.log()


def _first_beyond(cumulative: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """The first place (B,) whose running sum exceeds the threshold, and the sum before it."""
    total = cumulative[:, -1:]
    # Rounding up to the total would choose a place beyond the last that can be drawn.
    below = torch.nextafter(total, torch.zeros_like(total))
    thresholds = torch.minimum(thresholds[:, None], below)
    place = torch.searchsorted(cumulative, thresholds, right=True)
    before = torch.where(place > 0, cumulative.gather(1, (place - 1).clamp(min=0)), 0)
    return place[:, 0], before[:, 0]


def _of(values: Tensor, chosen: Tensor) -> Tensor:
    return values.gather(1, chosen[:, None])[:, 0]
