"""Prompts in, sampled responses out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from ppo_core.errors import ModelError
from ppo_core.models import LanguageModel
from ppo_core.prompts import Tokens
from ppo_core.records import Rollout
from ppo_core.tensors import at_least_fp32, length_mask, length_sorted_batches, pad_rows, tempered
from ppo_core.truncation import truncated
from ppo_core.trunks import DecoderTrunk

NO_STOP_TOKEN = -1
"""No token has this id: responses run to their full length."""


def stop_token(
    tokenizer: PreTrainedTokenizerBase, stop: str | None, stop_token_id: int | None
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


def sample_tokens(
    logits: Tensor, uniforms: Tensor, settings: SamplingSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature), cut to top_k and top_p.

    The token is the first whose cumulative probability exceeds `uniforms` (B,), numbers in
    [0, 1). With the randomness handed in, a row's token depends on nothing but the row:
    not on its neighbours, the batch size or the number of processes.

    Returns ids (B,), their log-probabilities under the whole policy (B,), and those under
    the distribution that was drawn from (B,), which are the same tensor where nothing is cut.
    """
    if settings.temperature == 0:
        logprobs = torch.log_softmax(at_least_fp32(logits), dim=-1)
        chosen = logprobs.argmax(dim=-1, keepdim=True)
        picked = logprobs.gather(1, chosen)[:, 0]
        return chosen[:, 0], picked, picked
    scaled = tempered(logits, settings.temperature)
    logprobs = drawn_from = torch.log_softmax(scaled, dim=-1)
    if settings.is_restricted:
        cut = truncated(scaled, top_k=settings.top_k, top_p=settings.top_p)
        drawn_from = torch.log_softmax(cut, dim=-1)
    cumulative = drawn_from.exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding up to the total would choose a token beyond the last that can be drawn.
    below = torch.nextafter(total, torch.zeros_like(total))
    thresholds = torch.minimum(uniforms[:, None] * total, below)
    chosen = torch.searchsorted(cumulative, thresholds, right=True)
    picked = logprobs.gather(1, chosen)[:, 0]
    behaviour = drawn_from.gather(1, chosen)[:, 0] if settings.is_restricted else picked
    return chosen[:, 0], picked, behaviour


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
    any_left: Callable[[bool], bool] = bool,
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
    any_left: Callable[[bool], bool],
) -> _Decoded:
    """The responses to one batch of prompts."""
    ids, prompt_lengths = (tensor.to(policy.device) for tensor in pad_rows(prompts, side="left"))
    width, most = ids.shape[1], uniforms.shape[1]
    decoded = _Decoded.empty(len(prompts), most, policy.device)

    fillers = width - prompt_lengths
    # A place is visible to its row from the first real token on, response places included.
    visible = torch.arange(width + most, device=policy.device) >= fillers[:, None]
    positions = (torch.arange(width + most, device=policy.device) - fillers[:, None]).clamp(min=0)
    cache = DynamicCache(config=policy.model.config)
    alive = torch.arange(len(prompts), device=policy.device)
    is_idle = False  # all responses have ended, and passes go on for other processes
    seen = 0
    for t in range(most):
        filled = width + t
        places = {"position_ids": positions[alive, seen:filled]} if trunk.takes_position_ids else {}
        hidden = trunk.hidden_states(
            ids,
            attention_mask=visible[alive, :filled].long(),
            past_key_values=cache,
            use_cache=True,
            **places,
        )
        seen = filled
        chosen, logprobs, behaviour = sample_tokens(
            policy.logits(hidden[:, -1]), uniforms[alive, t], settings
        )
        goes_on = chosen != settings.stop_token_id
        if not is_idle:
            decoded.ids[alive, t] = chosen
            decoded.logprobs[alive, t] = logprobs
            decoded.behaviour_logprobs[alive, t] = behaviour
            ended = alive[~goes_on]
            decoded.lengths[ended] = t + 1
            decoded.has_stop[ended] = True
            is_idle = not goes_on.any()
        if not any_left(not is_idle):
            break
        if is_idle:
            goes_on = torch.arange(len(alive), device=alive.device) == 0
        if not goes_on.all():
            alive, chosen = alive[goes_on], chosen[goes_on]
            # Finished rows leave the cache: what is left costs what its own tokens cost.
            cache.batch_select_indices(goes_on.nonzero()[:, 0])
        ids = chosen[:, None]
    return decoded
