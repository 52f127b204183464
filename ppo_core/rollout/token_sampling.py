"""Sampling settings, and drawing one token per sequence from its logits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppo_core.algorithm.temperature import at_least_fp32, tempered
from ppo_core.algorithm.top_k_top_p import truncated
from ppo_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ppo_core.config.ppo_config import PPOConfig

NO_STOP_TOKEN = -1
"""Stop token id for responses that always have the maximum length; no token has this id."""

BLOCK = 128
"""Tokens per block of the vocabulary. Cumulative sums over the blocks, and within one block, are
faster than a cumulative sum over the full vocabulary."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings for drawing tokens, and the token that ends a response."""

    stop_token_id: int
    temperature: float
    """Sampling temperature. With 0, the most likely token is chosen, and its log-probability is
    computed at temperature 1."""
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_restricted(self) -> bool:
        """Whether top_k or top_p truncates the policy's distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """A vLLM server that samples (docs/vllm.md)."""

    url: str
    weights_dir: str
    """Folder from which the server reads weights."""

    timeout: float
    """Seconds to wait for a reply, or for the server to become reachable."""

    at_once: int
    """Maximum number of prompts that are sampled at a time."""


def server_of(config: "PPOConfig") -> ServerSettings | None:
    """Return the vLLM server of a run; None without `use_vllm`."""
    if not config.use_vllm:
        return None
    return ServerSettings(
        url=config.vllm_server_base_url,
        weights_dir=str(config.vllm_weights_dir),
        timeout=config.vllm_server_timeout,
        at_once=config.local_rollout_forward_batch_size,
    )


def stop_token(
    tokenizer: "PreTrainedTokenizerBase", stop: str | None, stop_token_id: int | None
) -> int:
    """Return `stop_token_id` if set, else `NO_STOP_TOKEN` if `stop` is None, else end-of-sequence.

    Raises:
        ModelError: the end-of-sequence token is needed, but the tokenizer has none.
    """
    if stop_token_id is not None:
        return stop_token_id
    if stop is None:
        return NO_STOP_TOKEN
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "The policy's tokenizer has no end-of-sequence token, so no response would end before "
            "its maximum length. Set stop_token_id, or set stop_token=None if all responses should "
            "have this length."
        )
    return int(tokenizer.eos_token_id)


def own_stop_token(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the stop token of a model's generation_config, which servers use; None without one.

    If the model has several stop tokens, prefer the tokenizer's end-of-sequence token.
    """
    stops = model.generation_config.eos_token_id
    if isinstance(stops, list):
        own = tokenizer.eos_token_id
        return own if own in stops else next(iter(stops), None)
    return stops


def sample_tokens(
    logits: Tensor, uniforms: Tensor, settings: SamplingSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per sequence from softmax(logits / temperature), after top_k and top_p.

    `uniforms` (B,) has a number in [0, 1) for each sequence. The drawn token is the first token
    whose cumulative probability exceeds this number. The token therefore does not depend on other
    sequences, the batch size or the number of processes. Temperature 0 chooses the most likely
    token. The logits (B, V) may be overwritten. If a logit is NaN, the log-probabilities of its
    sequence are NaN.

    Returns token ids (B,), their log-probabilities (B,) under the full policy, and their
    log-probabilities (B,) under the truncated distribution. If nothing is truncated, both
    log-probabilities are the same tensor.
    """
    if settings.temperature == 0:
        logprobs = torch.log_softmax(at_least_fp32(logits), dim=-1)
        chosen = logprobs.argmax(dim=-1)
        picked = _at(logprobs, chosen)
        return chosen, picked, picked
    scaled = tempered(logits, settings.temperature)
    if not settings.is_restricted:
        chosen, picked = _draw(scaled, uniforms)
        return chosen, picked, picked
    cut = truncated(scaled, top_k=settings.top_k, top_p=settings.top_p)
    normalizer = scaled.logsumexp(dim=-1)
    chosen, behavior = _draw(cut, uniforms)
    return chosen, _at(scaled, chosen) - normalizer, behavior


def _draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token (B,) whose cumulative probability exceeds `uniforms` (B,).

    Also returns the token's log-probability (B,). The function finds the block of the token, then
    the token in the block. One cumulative sum over the full vocabulary would take longer. The
    logits (B, V) are overwritten.
    """
    batch, tokens = logits.shape
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    if missing := -tokens % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.view(batch, -1, BLOCK)
    cumulative = blocks.sum(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1]
    block, before = _first_above(cumulative, uniforms * total)
    inside = blocks[torch.arange(batch, device=block.device), block].cumsum(dim=-1)
    token, _ = _first_above(inside, uniforms * total - before)
    # If a logit is NaN, the token is arbitrary and its log-probability is NaN.
    chosen = (block * BLOCK + token).clamp(max=tokens - 1)
    return chosen, _at(weights, chosen).log() - total.log()


def _first_above(cumulative: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index (B,) whose sum exceeds the threshold, and the sum (B,) before it."""
    total = cumulative[:, -1:]
    # Keep thresholds below the total: if rounding made a threshold equal to the total, no sum would
    # exceed it.
    below = torch.nextafter(total, torch.zeros_like(total))
    thresholds = torch.minimum(thresholds[:, None], below)
    # No sum exceeds a NaN threshold, so the index that is found for it may be past the end.
    index = torch.searchsorted(cumulative, thresholds, right=True)
    index = index.clamp(max=cumulative.shape[1] - 1)
    before = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp(min=0)), 0)
    return index[:, 0], before[:, 0]


def _at(values: Tensor, chosen: Tensor) -> Tensor:
    return values.gather(1, chosen[:, None])[:, 0]
