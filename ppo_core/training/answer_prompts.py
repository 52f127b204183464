"""Responses of a policy to prompts, and its KL divergence from a reference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.data.encode_prompts import encode_prompt, prompt_text, response_texts
from ppo_core.data.prompt_set import PromptSet
from ppo_core.data.prompts import Prompt, Tokens, check_prompt_lengths, context_length
from ppo_core.data.types import Rollout
from ppo_core.distributed.choose_engine import choose_engine
from ppo_core.errors import ConfigError, DataError, TrainingError
from ppo_core.errors.out_of_memory import BatchSize
from ppo_core.io.progress_bar import BAR_DELAY, progress
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.logprobs_and_values import response_logprobs
from ppo_core.ppo.model_bundle import ModelBundle, reward_holders
from ppo_core.ppo.policy_sampler import FAR_SERVER
from ppo_core.ppo.update import TrainState
from ppo_core.reporting.metrics import sampler_metrics
from ppo_core.reporting.sample_table import Completions
from ppo_core.rollout.sample_responses import SamplingCallbacks, sample_responses
from ppo_core.rollout.token_sampling import (
    NO_STOP_TOKEN,
    SamplingSettings,
    ServerSettings,
    stop_token,
)
from ppo_core.training.answer_divergence import (
    LoadReference,
    divergence_of_greedy,
    divergence_of_samples,
)

CHECKED_PROMPTS, CHECKED_TOKENS = 8, 16
"""Number of prompts, and of tokens per response, that a server samples to check its weights."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One response to each prompt."""

    texts: list[str]
    """Responses without special tokens."""

    kl: float | None
    """KL divergence from the reference, in nats per response; see `divergence_of_samples` and, for
    greedy responses, `divergence_of_greedy`. None without a reference. Also None if responses are
    sampled with top_k or top_p, because they are then not samples from the policy's full
    distribution, and for greedy responses without a `reference_temperature`."""

    stopped: list[bool] | None
    """Whether each response ends in the stop token; None without a stop token."""


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    numbers: Sequence[int] | None = None,
    response_length: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int,
    batch_size: int = 64,
    stop: str | None = "eos",
    stop_token_id: int | None = None,
    load_reference: LoadReference | None = None,
    reference_temperature: float | None = None,
    server: ServerSettings | None = None,
) -> Answers:
    """Sample a response to each prompt, as in training; temperature 0 decodes greedily.

    `stop` and `stop_token_id` are the settings `stop_token` and `stop_token_id` of PPOConfig.
    `batch_size` is halved while memory is full. With `numbers`, only the prompts at these indices
    are answered; an answer does not depend on the other prompts. If a vLLM `server` is given, it
    samples with the model's weights. `load_reference` is called after the last pass through the
    model's backbone; the model's LM head is then moved to the reference's device. For
    `reference_temperature` see `divergence_of_greedy`.

    Raises:
        ConfigError: `temperature` is negative or not finite.
        DataError: `prompts` is a text, or a prompt has no token or leaves no room for a response.
        ModelError: the tokenizer has no stop token, the model cannot be sampled from, the context
            of the server's model is too short, or the reference has another vocabulary.
        TrainingError: the server cannot be reached or samples from another distribution, or the
            memory is too small for a single prompt.
    """
    _check_arguments(prompts, temperature)
    numbers = range(len(prompts)) if numbers is None else numbers
    if not numbers:
        return Answers(texts=[], kl=None, stopped=[])
    policy = LanguageModel(model)
    end = stop_token(tokenizer, stop, stop_token_id)
    sampling = SamplingSettings(
        stop_token_id=end, temperature=temperature, top_k=top_k, top_p=top_p
    )
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(prompts), response_length, generator=generator)[list(numbers)]
    encoded = [encode_prompt(tokenizer, prompts[number]) for number in numbers]
    context = context_length(model.config)
    check_prompt_lengths(encoded, context=context, response_length=response_length)
    batches = BatchSize(batch_size, "answering")
    rollout = _sample(policy, encoded, uniforms, sampling, batches, server)
    kl = None
    if load_reference is not None and temperature == 0:
        if reference_temperature:
            kl = divergence_of_greedy(rollout, load_reference, reference_temperature, batches)
    elif load_reference is not None and not sampling.is_restricted:
        kl = divergence_of_samples(policy, rollout, load_reference, batches)
    stopped = None if sampling.stop_token_id == NO_STOP_TOKEN else rollout.has_stop.tolist()
    return Answers(texts=response_texts(tokenizer, rollout), kl=kl, stopped=stopped)


def _check_arguments(prompts: Sequence[Prompt], temperature: float) -> None:
    if isinstance(prompts, str):
        raise DataError(
            f"prompts={prompts!r:.80} is a single text, and each of its characters would be a "
            "prompt. Give a list of prompts."
        )
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature={temperature} must be a finite number, at least 0.")


def _sample(
    policy: LanguageModel,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    settings: SamplingSettings,
    batches: BatchSize,
    server: ServerSettings | None,
) -> Rollout:
    """Sample responses on the server if there is one, otherwise in this process."""
    if server is not None:
        return _sample_by_server(server, policy, prompts, uniforms, settings, batches)

    def sample(rows: int) -> Rollout:
        with progress(len(prompts), "answering", "prompt", delay=BAR_DELAY) as bar:
            callbacks = SamplingCallbacks(on_finished=bar.update)
            return sample_responses(
                policy, prompts, uniforms, settings, batch_size=rows, callbacks=callbacks
            )

    return batches.run(sample)


def _sample_by_server(
    server: ServerSettings,
    policy: LanguageModel,
    prompts: Sequence[Tokens],
    uniforms: Tensor,
    settings: SamplingSettings,
    batches: BatchSize,
) -> Rollout:
    """Return a vLLM server's responses, after a check that the server has the policy's weights."""
    # Imported here, because the vLLM client takes a second to import.
    from ppo_core.rollout.vllm_sampler import VLLMSampler

    sampler = VLLMSampler(
        server, policy, None, choose_engine(), prompts, response_length=uniforms.shape[1]
    )
    version = sampler.synchronize()
    at_one = SamplingSettings(stop_token_id=settings.stop_token_id, temperature=1.0)
    tried = sampler.sample(
        prompts[:CHECKED_PROMPTS], uniforms[:CHECKED_PROMPTS, :CHECKED_TOKENS], at_one, version
    )
    mask = tried.response_mask
    own = batches.run(lambda rows: response_logprobs(policy, tried, rows))[mask]
    assert tried.behavior_logprobs is not None
    kl = sampler_metrics(own, tried.behavior_logprobs[mask], cap=1.0)["vllm/kl"]
    if not kl <= FAR_SERVER:  # also if it is NaN
        raise TrainingError(
            f"The KL divergence between the vLLM server at {server.url} and the policy is {kl:.3g} "
            f"nats per token; rounding explains at most {FAR_SERVER:g}. The server does not use "
            "all of the policy's weights, so its answers would not be the policy's answers. See "
            "the server's log and docs/vllm.md, or set use_vllm=False."
        )
    with progress(len(prompts), "answering", "prompt", delay=BAR_DELAY) as bar:
        return sampler.sample(prompts, uniforms, settings, version, on_finished=bar.update)


def greedy_completions(
    models: ModelBundle,
    state: TrainState,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptSet,
    *,
    response_length: int,
    stop_token_id: int,
    batch_size: int,
    moments: Mapping[str, RunningMoments] | None,
) -> Completions:
    """Return the greedy response to each prompt with its score, in every process.

    Each process decodes the responses to its own subset of the prompts. For `moments` see
    `RewardMix.total`.
    """
    engine, module = state.engine, state.module
    greedy = SamplingSettings(stop_token_id=stop_token_id, temperature=0)
    own = engine.share(len(prompts))
    with engine.gathered(module):
        rollout = sample_responses(
            models.policy,
            [prompts.tokens[n] for n in own],
            torch.zeros(len(own), response_length),
            greedy,
            batch_size=batch_size,
            callbacks=SamplingCallbacks(
                any_active=engine.any if engine.requires_equal_passes() else None
            ),
        )
    asked = [prompts.prompts[n] for n in own]
    with engine.all_gathered(reward_holders(models.rewards, module)):
        _, parts = models.rewards(asked, rollout, prompts.columns_at(own))
    scores = models.rewards.total(parts, moments)
    texts = response_texts(tokenizer, rollout)
    shown = [prompt_text(tokenizer, prompt) for prompt in asked]
    rows = list(zip(own, zip(shown, texts, scores.tolist(), strict=True), strict=True))
    # Two processes can answer the same prompt, because `share` repeats the last row.
    by_prompt = dict(engine.gather_objects(rows))
    queries, responses, values = zip(*(by_prompt[n] for n in sorted(by_prompt)), strict=True)
    return Completions(list(queries), list(responses), list(values))
