"""What a policy answers, and how far it has moved from its reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.algorithm.kl import kl_per_token
from ppo_core.data.prompt_set import PromptSet
from ppo_core.data.prompts import Prompt, encode_prompt, prompt_text, response_texts
from ppo_core.data.types import Rollout
from ppo_core.distributed.engine import Engine
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.model_bundle import reward_holders
from ppo_core.ppo.reward_functions import RewardMix
from ppo_core.ppo.scoring import reference_logprobs
from ppo_core.reporting.progress_bar import progress
from ppo_core.reporting.sample_table import Completions
from ppo_core.rollout.generate import sample_responses
from ppo_core.rollout.sampler import SamplingSettings, stop_token


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One answer to each prompt."""

    texts: list[str]
    """The answers, special tokens left out."""

    kl: float | None
    """Nats between policy and reference, summed over an answer, mean over the prompts (k1).
    None without a reference, or where the answers are no sample of the whole policy: greedy ones,
    or those cut to top_k or top_p."""


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    response_length: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int,
    batch_size: int = 64,
    stop: str | None = "eos",
    stop_token_id: int | None = None,
    reference: PreTrainedModel | None = None,
) -> Answers:
    """Answer each prompt by the sampler that training uses; temperature 0 decodes greedily.

    `stop` and `stop_token_id` end an answer as `stop_token` of PPOConfig and its id do.
    """
    if not prompts:
        return Answers(texts=[], kl=None)
    policy = LanguageModel(model)
    sampling = SamplingSettings(
        stop_token_id=stop_token(tokenizer, stop, stop_token_id),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    is_sample = temperature > 0 and not sampling.is_restricted
    compared = LanguageModel(reference) if reference is not None and is_sample else None
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(prompts), response_length, generator=generator)
    with progress(len(prompts), "answering", "prompt") as bar:
        rollout = sample_responses(
            policy,
            [encode_prompt(tokenizer, prompt) for prompt in prompts],
            uniforms,
            sampling,
            batch_size=batch_size,
            ended=bar.update,
        )
    kl = None if compared is None else _divergence(rollout, compared, batch_size).mean().item()
    return Answers(texts=response_texts(tokenizer, rollout), kl=kl)


def _divergence(rollout: Rollout, reference: LanguageModel, batch_size: int) -> Tensor:
    """Nats (B,) between the policy that sampled a rollout and a reference."""
    ref_logprobs = reference_logprobs(reference, rollout, batch_size)
    # Both are 0 where a token does not count.
    return kl_per_token(rollout.logprobs, ref_logprobs, "k1").sum(dim=1)


def greedy_completions(
    policy: LanguageModel,
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptSet,
    rewards: RewardMix,
    engine: Engine,
    *,
    response_length: int,
    stop_token_id: int,
    batch_size: int,
) -> Completions:
    """The likeliest answer to each prompt and its score, of all processes, in every process.

    module is what the engine prepared with the policy in it.
    """
    greedy = SamplingSettings(stop_token_id=stop_token_id, temperature=0)
    own = engine.share(len(prompts))
    with engine.gathered(module):
        rollout = sample_responses(
            policy,
            [prompts.tokens[n] for n in own],
            torch.zeros(len(own), response_length),
            greedy,
            batch_size=batch_size,
            any_left=engine.any if engine.passes_meet() else None,
        )
    asked = [prompts.prompts[n] for n in own]
    with engine.all_gathered(reward_holders(rewards, module)):
        given, _ = rewards(asked, rollout)
    texts = response_texts(tokenizer, rollout)
    shown = [prompt_text(tokenizer, prompt) for prompt in asked]
    rows = list(zip(own, zip(shown, texts, given.tolist(), strict=True), strict=True))
    # A prompt that fills up a share is answered twice.
    of_prompt = dict(engine.gather_objects(rows))
    queries, responses, scores = zip(*(of_prompt[n] for n in sorted(of_prompt)), strict=True)
    return Completions(list(queries), list(responses), list(scores))
