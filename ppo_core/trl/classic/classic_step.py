"""One PPO step of the classic loop: run the models on the responses, then update the policy."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_core.data.types import Experience, Rollout, Scores, TokenSums
from ppo_core.distributed.engine import Engine
from ppo_core.errors import DataError
from ppo_core.models.critic import ActorCritic
from ppo_core.ppo.experience import divergence, make_experience, shaped_scores
from ppo_core.ppo.logprobs_and_values import response_logprobs, truncated_logprobs
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.optimizer import make_train_state
from ppo_core.ppo.rewards import RewardMix
from ppo_core.ppo.run_state import RunState
from ppo_core.ppo.schedule import make_schedule
from ppo_core.ppo.scoring import score
from ppo_core.ppo.update import TrainState, UpdateProgress, update_policy
from ppo_core.reporting.metrics import Metrics, PhaseTimer, update_metrics
from ppo_core.rollout.token_sampling import NO_STOP_TOKEN, SamplingSettings
from ppo_core.trl.classic.classic_config import ClassicPPOConfig
from ppo_core.trl.classic.step_inputs import Masks, check_scores, make_rollout
from ppo_core.trl.classic.step_stats import Stats, step_stats

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
        self._schedule = make_schedule(
            self._settings, num_prompts=config.steps, num_processes=engine.num_processes
        )
        self.train_state = self._make_train_state(optimizer)
        self.sampled = SamplingSettings(stop_token_id=NO_STOP_TOKEN, temperature=config.temperature)
        """Settings with which the script samples the responses that it passes to the next step."""
        self._run = RunState.at_start(self._settings, self._schedule, config.steps)
        self._timer = PhaseTimer()

    @contextmanager
    def full_policy(self) -> Iterator[None]:
        """Return a context with the unsharded policy in every process, and with autocast."""
        with self._engine.gathered(self.train_state.module), self._engine.autocast():
            yield

    def take(self, inputs: StepInputs) -> Stats:
        """Take one PPO step; return its statistics.

        Raises:
            DataError: the number of rows is not `batch_size`, a row is invalid, or a score is not
                finite.
            TrainingError: too many optimizer steps in a row were skipped.
        """
        config, run, timer = self._settings, self._run, self._timer
        size, gather = self._schedule.batch_size, self._engine.gather_record
        given = check_scores(inputs.scores, self._config.batch_size)
        self._require_finite(given)
        with timer("ppo/total"):
            with timer("ppo/forward_pass"):
                rollout = self._make_rollout(inputs)
                scores = self._score(rollout, given.to(self._engine.device))
                rollout, scores = gather(rollout, size), gather(scores, size)
            with timer("ppo/compute_rewards"):
                shaped = shaped_scores(scores.scores, rollout, config, run.moments)
                scores = replace(scores, scores=shaped)
                kl_coef = run.kl_coef(config)
                kl = divergence(rollout, scores, config.kl_estimator)
            with timer("ppo/compute_advantages"):
                experience = make_experience(rollout, scores, kl, config, kl_coef=kl_coef)
            learning_rate = self.train_state.optimizer.param_groups[0]["lr"]
            with timer("ppo/optimize_step"):
                sums = self._update(experience)
            with timer("ppo/calc_stats"):
                stats = step_stats(
                    experience, scores, kl, sums, kl_coef=kl_coef, vf_coef=config.vf_coef
                )
                stats["ppo/learning_rate"] = learning_rate
                stats["ppo/skipped_steps"] = float(self.train_state.skipped_steps)
                if run.adaptive_kl is not None:
                    run.adaptive_kl.update(stats["objective/kl"], size)
                self._warn(update_metrics(sums) | {"objective/kl": stats["objective/kl"]})
        return stats | timer.pop()

    def _make_rollout(self, inputs: StepInputs) -> Rollout:
        config: PretrainedConfig = self._models.policy.model.config
        rollout = make_rollout(
            inputs.queries,
            inputs.responses,
            inputs.masks,
            batch_size=self._config.batch_size,
            start_token_id=config.decoder_start_token_id if config.is_encoder_decoder else None,
            eos_token_id=self._eos_token_id,
            temperature=self.sampled.temperature,
            device=self._engine.device,
        )
        policy, size, sampled = self._models.policy, self._config.mini_batch_size, self.sampled
        equal_passes = self._engine.requires_equal_passes()
        with self.full_policy():
            # Recompute log-probabilities, because generation rounds differently (TRL #2358).
            rollout.logprobs.copy_(
                response_logprobs(policy, rollout, size, equal_passes=equal_passes)
            )
            if not sampled.is_restricted:
                return rollout
            cut = truncated_logprobs(
                policy,
                rollout,
                size,
                top_k=sampled.top_k,
                top_p=sampled.top_p,
                equal_passes=equal_passes,
            )
        return replace(rollout, behavior_logprobs=cut)

    def _require_finite(self, given: Tensor) -> None:
        if self._engine.any(not bool(given.isfinite().all())):
            raise DataError(
                f"Scores must be finite in all processes; in this process they are "
                f"{given.tolist()}."
            )

    def _score(self, rollout: Rollout, given: Tensor) -> Scores:
        models = replace(self._models, rewards=RewardMix({"given": lambda *_: given}, None))
        return score(rollout, [], models, self.train_state.module, self._engine, self._settings)

    def _update(self, experience: Experience) -> TokenSums:
        state, shuffling = self.train_state, self._run.generators["shuffling"]
        progress = UpdateProgress.at_start(self._settings, len(experience.rollout), shuffling)
        sums = update_policy(state, experience, self._settings, progress)
        self._run.health.check_skipped(state.skipped_in_a_row)
        return sums

    def _warn(self, metrics: Metrics) -> None:
        if self._engine.is_main:
            for finding in self._run.health.check(metrics):
                logger.warning("%s", finding)

    def _make_train_state(self, optimizer: torch.optim.Optimizer | None) -> TrainState:
        module = ActorCritic(self._models.policy, self._models.critic)
        if optimizer is None:
            trained = [p for p in module.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(trained, lr=self._config.learning_rate)
        state = make_train_state(
            self._settings,
            module,
            self._models.reference,
            self._schedule,
            self._engine,
            optimizer,
            # Constant here: the script's own lr_scheduler changes the rate, once per step().
            torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 1.0),
            pretraining=None,
        )
        # Like TRL's classic loop, never fail because of steps with a large ratio.
        state.large_ratios_end_run = False
        return state
