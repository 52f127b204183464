"""The prompts of an update, and the responses that the policy samples for them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompt_set import PromptSet
from ppo_core.data.prompts import Prompt, Tokens
from ppo_core.data.reward_columns import Columns
from ppo_core.data.types import Rollout
from ppo_core.distributed.engine import Engine
from ppo_core.io.progress_bar import tell_moved
from ppo_core.ppo.logprobs_and_values import response_logprobs
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.run_state import RunState
from ppo_core.reporting.metrics import Metrics, PhaseTimer, sampler_metrics
from ppo_core.rollout.sample_responses import SamplingCallbacks, sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings, server_of

if TYPE_CHECKING:
    from ppo_core.rollout.vllm_sampler import VLLMSampler

FAR_SERVER = 0.1
"""Largest KL divergence between vLLM server and policy that rounding can cause, in nats a token."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The prompts of an update, and the random numbers for sampling this process's responses."""

    rows: list[int]
    """Indices in the prompt set, for the prompts of all processes."""

    prompts: list[Prompt]
    """Prompts of this process, as text or messages."""

    tokens: list[Tokens]
    """Token ids of `prompts`."""

    columns: Columns
    """Columns that reward functions take, from the rows of `prompts`."""

    uniforms: Tensor
    """Random numbers in [0, 1), shape (B, T), one for each token that may be sampled."""


def draw_prompts(
    run: RunState, prompts: PromptSet, engine: Engine, *, size: int, response_length: int
) -> PromptBatch:
    """Draw the next `size` prompts, and the random numbers for sampling their responses.

    Every process draws the random numbers of the full batch, so that no response depends on the
    number of processes.
    """
    uniforms = torch.rand(size, response_length, generator=run.generators["sampling"])
    rows, share = run.stream.next_batch(size), engine.share(size)
    own = [rows[n] for n in share]
    return PromptBatch(
        rows=rows,
        prompts=[prompts.prompts[row] for row in own],
        tokens=[prompts.tokens[row] for row in own],
        columns=prompts.columns_at(own),
        uniforms=uniforms[share],
    )


@dataclass(frozen=True, kw_only=True)
class PolicySampler:
    """Samples responses from the policy, in this process or on a vLLM server."""

    config: PPOConfig
    models: ModelBundle
    module: nn.Module
    """Policy and critic as the engine prepared them."""

    engine: Engine
    settings: SamplingSettings
    prompts: PromptSet
    timer: PhaseTimer

    def sample(self, batch: PromptBatch, pause: Callable[[], None]) -> Rollout:
        """Sample one response to each prompt of this process.

        Without vLLM, `pause` is called before each batch of prompts. It may raise to stop sampling.
        """
        if self.config.use_vllm:
            return self._sample_by_vllm(batch)
        with self.engine.gathered(self.module), self.engine.autocast():
            return sample_responses(
                self.models.policy,
                batch.tokens,
                batch.uniforms,
                self.settings,
                batch_size=self.config.local_rollout_forward_batch_size,
                callbacks=SamplingCallbacks(
                    any_active=self.engine.any if self.engine.requires_equal_passes() else None,
                    before_batch=pause,
                    on_finished=lambda number: tell_moved("sampling"),
                ),
            )

    def metrics(self, rollout: Rollout) -> Metrics:
        """Return metrics of the divergence between a vLLM server and the policy; {} without vLLM.

        Log a warning if the divergence is larger than rounding can explain.
        """
        if not self.config.use_vllm:
            return {}
        assert rollout.behavior_logprobs is not None
        mask = rollout.response_mask
        metrics = sampler_metrics(
            rollout.logprobs[mask],
            rollout.behavior_logprobs[mask],
            cap=self.config.vllm_importance_sampling_cap,
        )
        # top_k and top_p exclude tokens, which also increases the divergence.
        is_far = metrics["vllm/kl"] > FAR_SERVER and not self.settings.is_restricted
        if is_far and self.engine.is_main:
            logger.warning(
                "The KL divergence between vLLM server and policy is %.3g nats per token. The "
                "server does not use all of the policy's weights, or computes with other settings. "
                "The policy learns little from this batch. See the server's log and docs/vllm.md.",
                metrics["vllm/kl"],
            )
        return metrics

    def _sample_by_vllm(self, batch: PromptBatch) -> Rollout:
        """Return the server's samples, with the policy's own log-probabilities of the samples."""
        with self.timer("synchronising"):
            version = self._vllm.synchronize()
        rollout = self._vllm.sample(
            batch.tokens,
            batch.uniforms,
            self.settings,
            version,
            on_finished=lambda number: tell_moved("sampling"),
        )
        size = self.config.local_rollout_forward_batch_size
        with self.engine.autocast(), self.engine.gathered(self.module):
            logprobs = response_logprobs(
                self.models.policy, rollout, size, equal_passes=self.engine.requires_equal_passes()
            )
        return replace(rollout, logprobs=logprobs)

    @cached_property
    def _vllm(self) -> "VLLMSampler":
        # Imported only here, because the vLLM client takes a second to import.
        from ppo_core.rollout.vllm_sampler import VLLMSampler

        server = server_of(self.config)
        assert server is not None
        return VLLMSampler(
            server,
            self.models.policy,
            self.models.adapted,
            self.engine,
            self.prompts.tokens,
            response_length=self.config.response_length,
        )
