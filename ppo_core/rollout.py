"""Prompts in, sampled responses out."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from ppo_core.errors import ModelError
from ppo_core.models import LanguageModel
from ppo_core.prompts import Tokens
from ppo_core.records import Rollout
from ppo_core.tensors import at_least_fp32, length_sorted_batches, pad_rows, tempered


def stop_token(tokenizer: PreTrainedTokenizerBase, stop_token_id: int | None) -> int:
    """The token that ends a response: the one that is set, else end-of-sequence.

    Raises:
        ModelError: none is set, and the tokenizer has no end-of-sequence token.
    """
    if stop_token_id is not None:
        return stop_token_id
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "The policy's tokenizer has no end-of-sequence token: no response would ever end. "
            "Set stop_token_id."
        )
    return int(tokenizer.eos_token_id)


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature): ids (B,), log-probabilities (B,).

    The token is the first whose cumulative probability exceeds `uniforms` (B,), numbers in
    [0, 1). With the randomness handed in, a row's token depends on nothing but the row:
    not on its neighbours, the batch size or the number of processes.

    Temperature 0 takes the likeliest token, its log-probability that of temperature 1.
    """
    if temperature == 0:
        logprobs = torch.log_softmax(at_least_fp32(logits), dim=-1)
        chosen = logprobs.argmax(dim=-1, keepdim=True)
    else:
        logprobs = torch.log_softmax(tempered(logits, temperature), dim=-1)
        cumulative = logprobs.exp().cumsum(dim=-1)
        thresholds = uniforms[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, thresholds, right=True)
        chosen = chosen.clamp(max=logits.shape[-1] - 1)
    return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]


@torch.no_grad()
def sample_responses(
    policy: LanguageModel,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    *,
    stop_token_id: int,
    temperature: float,
    batch_size: int,
) -> Rollout:
    """Sample one response to each prompt, ending at the stop token or after T tokens.

    uniforms is (B, T), one number in [0, 1) for each token that may be drawn. Prompts of
    similar length are sampled together, `batch_size` at a time, with a KV cache. On CPU and
    in fp32 the recorded log-probabilities equal those of a training pass to about 1e-6.
    """
    device = policy.device
    prompt_ids, prompt_lengths = pad_rows(prompts)
    uniforms = uniforms.to(device)
    response_ids = torch.zeros(uniforms.shape, dtype=torch.long, device=device)
    logprobs = torch.zeros(uniforms.shape, device=device)
    lengths = torch.zeros(len(prompts), dtype=torch.long, device=device)
    has_stop = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for batch in length_sorted_batches(prompt_lengths, batch_size):
        rows = batch.to(device)
        decoded = _decode(
            policy,
            [prompts[i] for i in batch.tolist()],
            uniforms[rows],
            stop_token_id=stop_token_id,
            temperature=temperature,
        )
        response_ids[rows], logprobs[rows], lengths[rows], has_stop[rows] = decoded
    return Rollout(
        prompt_ids=prompt_ids.to(device),
        prompt_lengths=prompt_lengths.to(device),
        response_ids=response_ids,
        response_lengths=lengths,
        has_stop=has_stop,
        logprobs=logprobs,
        temperature=temperature,
    )


def _decode(
    policy: LanguageModel,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    *,
    stop_token_id: int,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Response ids, log-probabilities, lengths and stops of one batch of prompts."""
    ids, prompt_lengths = (tensor.to(policy.device) for tensor in pad_rows(prompts, side="left"))
    width, most = ids.shape[1], uniforms.shape[1]
    tokens = torch.zeros(uniforms.shape, dtype=torch.long, device=policy.device)
    logprobs = torch.zeros(uniforms.shape, device=policy.device)
    lengths = torch.full_like(prompt_lengths, most)
    has_stop = torch.zeros_like(prompt_lengths, dtype=torch.bool)

    fillers = width - prompt_lengths
    # A place is visible to its row from the first real token on, response places included.
    visible = torch.arange(width + most, device=policy.device) >= fillers[:, None]
    positions = (torch.arange(width + most, device=policy.device) - fillers[:, None]).clamp(min=0)
    # The few families without (Bloom, MPT) derive the places from the mask.
    named_places = policy.takes_position_ids
    cache = DynamicCache(config=policy.model.config)
    alive = torch.arange(len(prompts), device=policy.device)
    seen = 0
    for t in range(most):
        filled = width + t
        places = {"position_ids": positions[alive, seen:filled]} if named_places else {}
        hidden = policy.hidden_states(
            ids,
            attention_mask=visible[alive, :filled].long(),
            past_key_values=cache,
            use_cache=True,
            **places,
        )
        seen = filled
        chosen, chosen_logprobs = sample_tokens(
            policy.logits(hidden[:, -1]), uniforms[alive, t], temperature
        )
        tokens[alive, t] = chosen
        logprobs[alive, t] = chosen_logprobs
        goes_on = chosen != stop_token_id
        if not goes_on.all():
            ended = alive[~goes_on]
            lengths[ended] = t + 1
            has_stop[ended] = True
            alive, chosen = alive[goes_on], chosen[goes_on]
            if len(alive) == 0:
                break
            # Finished rows leave the cache: what is left costs what its own tokens cost.
            cache.batch_select_indices(goes_on.nonzero()[:, 0])
        ids = chosen[:, None]
    return tokens, logprobs, lengths, has_stop
