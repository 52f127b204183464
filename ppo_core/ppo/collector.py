"""The batch of an update: prompts drawn, answered by the policy, scored, and brought together."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompt_set import PromptSet
from ppo_core.data.prompts import Prompt, prompt_text, response_texts
from ppo_core.data.types import Record, Rollout, Scores, map_tensors
from ppo_core.distributed.engine import Engine
from ppo_core.ppo.experience import divergence, make_experience, shaped_scores
from ppo_core.ppo.model_bundle import ModelBundle, reward_holders
from ppo_core.ppo.run_state import PendingUpdate, RunState
from ppo_core.ppo.schedule import Schedule
from ppo_core.ppo.scoring import critic_values, full_kl, reference_logprobs
from ppo_core.ppo.update import UpdateProgress
from ppo_core.reporting.metrics import Metrics, objective_metrics, sampler_metrics
from ppo_core.rollout.generate import SamplingCallbacks, sample_responses
from ppo_core.rollout.sampler import SamplingSettings

if TYPE_CHECKING:
    from ppo_core.rollout.vllm_sampler import VLLMSampler

FAR_SERVER = 0.1
"""Nats a token between a vLLM server and the policy that rounding does not explain."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Samples and scores, each process its share; every process then has the whole batch."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    parts: ModelBundle
    module: nn.Module
    """Policy and critic as the engine prepared them."""

    engine: Engine
    prompts: PromptSet
    schedule: Schedule
    sampling: SamplingSettings

    def collect(self, run: RunState, *, kl_coef: float, pause: Callable[[], None]) -> PendingUpdate:
        """The next batch of a run. `pause` is called again and again, and may raise."""
        rows, uniforms = self._draw(run)
        share = self.engine.share(len(rows))
        own = [rows[n] for n in share]
        seconds: Metrics = {}
        with _timed("sampling", seconds):
            asked = [self.prompts.tokens[row] for row in own]
            rollout = self._sample(asked, uniforms[share], pause, seconds)
        pause()
        with _timed("scoring", seconds):
            scores = self._score(rollout, [self.prompts.prompts[row] for row in own])
        pause()
        rollout, scores = self._everywhere(rollout), self._everywhere(scores)
        usable = bool(scores.scores.isfinite().all())
        if usable:
            shaped = shaped_scores(scores.scores, rollout, self.config, run.moments)
            scores = replace(scores, scores=shaped)
        elif self.engine.is_main:
            logger.warning(self._describe_broken(scores.scores, rows, rollout))
        kl = divergence(rollout, scores, self.config.kl_estimator)
        metrics = objective_metrics(rollout, scores, kl, kl_coef=kl_coef) | seconds
        if self.config.use_vllm:
            metrics |= self._sampler_metrics(rollout)
        experience = None
        if usable:
            experience = make_experience(rollout, scores, kl, self.config, kl_coef=kl_coef)
        return PendingUpdate(
            experience=experience,
            metrics=metrics,
            progress=UpdateProgress.at_start(self.config, len(rows), run.generators["shuffling"]),
        )

    def _draw(self, run: RunState) -> tuple[list[int], Tensor]:
        """The rows of the next prompts, and the randomness (B, T) to answer them.

        Every process draws for the whole batch, so that a response does not depend on how many
        processes there are.
        """
        size, length = self.schedule.batch_size, self.config.response_length
        uniforms = torch.rand(size, length, generator=run.generators["sampling"])
        return run.stream.next_batch(size), uniforms

    def _sample(
        self,
        prompts: Sequence[list[int]],
        uniforms: Tensor,
        pause: Callable[[], None],
        seconds: Metrics,
    ) -> Rollout:
        if self.config.use_vllm:
            return self._sample_by_vllm(prompts, uniforms, seconds)
        with self.engine.gathered(self.module), self.engine.autocast():
            return sample_responses(
                self.parts.policy,
                prompts,
                uniforms,
                self.sampling,
                batch_size=self.config.local_rollout_forward_batch_size,
                callbacks=SamplingCallbacks(
                    any_active=self.engine.any if self.engine.passes_meet() else None,
                    before_batch=pause,
                ),
            )

    def _sample_by_vllm(
        self, prompts: Sequence[list[int]], uniforms: Tensor, seconds: Metrics
    ) -> Rollout:
        """What a server samples, with the policy's own log-probabilities of it."""
        with _timed("synchronising", seconds):
            version = self._vllm.synchronise()
        rollout = self._vllm.sample(prompts, uniforms, self.sampling, version)
        size = self.config.local_rollout_forward_batch_size
        with self.engine.autocast(), self.engine.gathered(self.module):
            logprobs = reference_logprobs(self.parts.policy, rollout, size)
        return replace(rollout, logprobs=logprobs)

    @cached_property
    def _vllm(self) -> "VLLMSampler":
        # Only here: its client takes a second to load.
        from ppo_core.rollout.vllm_sampler import VLLMSampler

        return VLLMSampler(
            self.config, self.parts.policy, self.parts.adapted, self.engine, self.prompts.tokens
        )

    def _sampler_metrics(self, rollout: Rollout) -> Metrics:
        assert rollout.behaviour_logprobs is not None
        mask = rollout.response_mask
        metrics = sampler_metrics(
            rollout.logprobs[mask],
            rollout.behaviour_logprobs[mask],
            cap=self.config.vllm_importance_sampling_cap,
        )
        # What top_k and top_p cut off is a divergence, too.
        is_far = metrics["vllm/kl"] > FAR_SERVER and not self.sampling.is_restricted
        if is_far and self.engine.is_main:
            logger.warning(
                "The vLLM server is %.3g nats a token from the policy whose weights it was given: "
                "it does not use all of them, or computes otherwise. Most of the batch teaches "
                "nothing so. See its log, and docs/vllm.md.",
                metrics["vllm/kl"],
            )
        return metrics

    def _score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Scores:
        """What reference, critic and rewards say; the scores are as the rewards gave them.

        One after the other is whole where they are sharded.
        """
        parts, gathered = self.parts, self.engine.gathered
        size = self.config.local_rollout_forward_batch_size
        full = None
        with self.engine.autocast():
            with self.engine.all_gathered(reward_holders(parts.rewards, self.module)):
                scores, of_rewards = parts.rewards(prompts, rollout)
            # The reference of an adapter is the policy's own base.
            with gathered(self.module if parts.shares_weights else parts.reference):
                ref_logprobs = reference_logprobs(parts.reference, rollout, size)
            with gathered(self.module):
                values = critic_values(parts.critic, rollout, size)
            if self.config.kl_estimator == "full":
                with self.engine.all_gathered([self.module, parts.reference]):
                    full = full_kl(parts.policy, parts.reference, rollout, size)
        return Scores(
            scores=scores,
            parts=of_rewards,
            ref_logprobs=ref_logprobs,
            values=values,
            full_kl=full,
        )

    def _everywhere(self, record: Record) -> Record:
        gather = partial(self.engine.gather_rows, rows=self.schedule.batch_size)
        return map_tensors(record, gather)

    def _describe_broken(self, scores: Tensor, rows: Sequence[int], rollout: Rollout) -> str:
        broken = (~scores.isfinite()).nonzero()[:, 0].tolist()
        first = broken[0]
        prompt = prompt_text(self.tokenizer, self.prompts.prompts[rows[first]])
        answer = response_texts(self.tokenizer, rollout)[first]
        return (
            f"{len(broken)} of {len(scores)} scores are not finite, the first of them "
            f"{scores[first].item()} for the prompt {prompt!r} with the response {answer!r}. "
            "Nothing is learned from this batch, in no process. Remove the prompt or mend the "
            "reward."
        )


@contextmanager
def _timed(phase: str, seconds: Metrics) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[f"time/{phase}"] = time.monotonic() - started
