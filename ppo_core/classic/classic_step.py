"""One PPO step of the classic loop: run the models on the responses, then update the policy."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.classic.classic_config import ClassicPPOConfig
from ppo_core.classic.step_inputs import Masks, check_scores, make_rollout
from ppo_core.classic.step_stats import Stats, health_metrics, step_stats
from ppo_core.data.types import Experience, Record, Rollout, Scores, TokenSums, map_tensors
from ppo_core.distributed.engine import Engine
from ppo_core.errors import DataError
from ppo_core.models.actor_critic import ActorCritic
from ppo_core.ppo.experience import divergence, make_experience, shaped_scores
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.optimizer import check_optimizer, check_sharding
from ppo_core.ppo.run_state import make_adaptive_kl
from ppo_core.ppo.scoring import critic_values, exact_kl, response_logprobs
from ppo_core.ppo.update import TrainState, UpdateProgress, update_policy
from ppo_core.reporting.health import HealthMonitor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInputs:
    """One batch from the script: queries, responses, scores and masks."""

    queries: Sequence[Tensor]
    responses: Sequence[Tensor]
    scores: Sequence[Tensor | float]
    masks: Masks = None


class ClassicStep:
    """Takes PPO steps; holds the models, the optimizer and the running statistics."""

    def __init__(
        self,
        config: ClassicPPOConfig,
        models: ModelBundle,
        engine: Engine,
        optimizer: torch.optim.Optimizer | None,
        *,
        eos_token_id: int | None,
    ) -> None:
        """Prepare policy and critic for training; `optimizer=None` uses Adam."""
        self._config, self._settings = config, config.update_settings()
        self._models, self._engine = models, engine
        self._eos_token_id = eos_token_id
        self.train_state = self._make_train_state(optimizer)
        self._global_batch_size = config.batch_size * engine.num_processes
        self._adaptive_kl = make_adaptive_kl(self._settings, self._global_batch_size)
        self._moments = RunningMoments()
        self._health = HealthMonitor(self._settings)
        self._shuffling = torch.Generator().manual_seed(config.seed)

    @contextmanager
    def full_policy(self) -> Iterator[None]:
        """Return a context with the unsharded policy in every process, and with autocast."""
        with self._engine.gathered(self.train_state.module), self._engine.autocast():
            yield

    def take(self, inputs: StepInputs) -> Stats:
        """Take one PPO step; return its statistics.

        Raises:
            DataError: the number of rows is not `batch_size`, or a row is invalid.
            TrainingError: too many optimizer steps in a row were skipped.
        """
        started = time.monotonic()
        given = check_scores(inputs.scores, self._config.batch_size)
        with self.full_policy():
            rollout = self._make_rollout(inputs)
            scores = self._score(rollout, given.to(self._engine.device))
        rollout, scores = self._gather(rollout), self._gather(scores)
        shaped = shaped_scores(scores.scores, rollout, self._settings, self._moments)
        scores = replace(scores, scores=shaped)
        scored = time.monotonic()
        kl_coef = self._adaptive_kl.kl_coef if self._adaptive_kl else self._settings.kl_coef
        kl = divergence(rollout, scores, self._settings.kl_estimator)
        experience = make_experience(rollout, scores, kl, self._settings, kl_coef=kl_coef)
        learning_rate = self.train_state.optimizer.param_groups[0]["lr"]
        sums = self._update(experience)
        vf_coef = self._settings.vf_coef
        stats = step_stats(experience, scores, kl, sums, kl_coef=kl_coef, vf_coef=vf_coef)
        stats["ppo/learning_rate"] = learning_rate
        stats["ppo/skipped_steps"] = float(self.train_state.skipped_steps)
        stats["time/ppo/forward_pass"] = scored - started
        stats["time/ppo/total"] = time.monotonic() - started
        self._adapt_and_warn(stats)
        return stats

    def _make_rollout(self, inputs: StepInputs) -> Rollout:
        config: PretrainedConfig = self._models.policy.model.config
        rollout = make_rollout(
            inputs.queries,
            inputs.responses,
            inputs.masks,
            batch_size=self._config.batch_size,
            start_token_id=config.decoder_start_token_id if config.is_encoder_decoder else None,
            eos_token_id=self._eos_token_id,
            temperature=self._config.temperature,
            device=self._engine.device,
        )
        # Recompute log-probabilities, because generation rounds differently (TRL #2358).
        size = self._config.mini_batch_size
        rollout.logprobs.copy_(response_logprobs(self._models.policy, rollout, size))
        return rollout

    def _score(self, rollout: Rollout, given: Tensor) -> Scores:
        if self._engine.any(not bool(given.isfinite().all())):
            raise DataError(
                f"Scores must be finite in all processes; in this process they are "
                f"{given.tolist()}."
            )
        policy, reference = self._models.policy, self._models.reference
        size, exact = self._config.mini_batch_size, self._settings.kl_estimator == "full"
        return Scores(
            scores=given,
            ref_logprobs=response_logprobs(reference, rollout, size),
            values=critic_values(self._models.critic, rollout, size),
            full_kl=exact_kl(policy, reference, rollout, size) if exact else None,
        )

    def _gather(self, record: Record) -> Record:
        """Gather the sequences of all processes into one record, in every process."""
        gather = partial(self._engine.gather_rows, rows=self._global_batch_size)
        return map_tensors(record, gather)

    def _update(self, experience: Experience) -> TokenSums:
        """Update policy and critic; return the sums over all processes."""
        state = self.train_state
        progress = UpdateProgress.at_start(self._settings, len(experience.rollout), self._shuffling)
        sums = update_policy(state, experience, self._settings, progress)
        self._health.check_skipped(state.skipped_in_a_row)
        return sums

    def _adapt_and_warn(self, stats: Stats) -> None:
        if self._adaptive_kl is not None:
            self._adaptive_kl.update(stats["objective/kl"], self._global_batch_size)
        if self._engine.is_main:
            for warning in self._health.check(health_metrics(stats)):
                logger.warning("%s", warning)

    def _make_train_state(self, optimizer: torch.optim.Optimizer | None) -> TrainState:
        module = ActorCritic(self._models.policy, self._models.critic)
        if optimizer is None:
            trained = [p for p in module.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(trained, lr=self._config.learning_rate)
        check_optimizer(optimizer, module)
        check_sharding(self._settings, self._engine, module)
        prepared, optimizer = self._engine.prepare(module, optimizer)
        # Constant, because the script's lr_scheduler advances once per call of step().
        constant = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 1.0)
        return TrainState(
            module=prepared,
            optimizer=optimizer,
            scheduler=constant,
            engine=self._engine,
            # Like TRL's classic loop, never fail because of steps with a large ratio.
            large_ratios_end_run=False,
        )
