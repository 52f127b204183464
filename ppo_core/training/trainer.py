"""The training of a policy with PPO: the phases of an update, the run, and its set-up."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ppo_core.checkpointing.checkpointer import Checkpointer, SavePlan
from ppo_core.checkpointing.ppo_checkpoint import CheckpointContents
from ppo_core.checkpointing.ppo_fingerprint import ppo_fingerprint
from ppo_core.checkpointing.state_form import FORMS
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.encode_prompts import prompt_text, response_texts
from ppo_core.data.prompt_set import PromptSet, RunPrompts
from ppo_core.data.types import Rollout, Scores, TokenSums, map_tensors
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.interruption import Interruption
from ppo_core.errors import ConfigError, RunInterruptedError
from ppo_core.errors.out_of_memory import explained_out_of_memory
from ppo_core.io.progress_bar import PhaseLines, listening, progress
from ppo_core.io.random_state import global_rng_state, restore_global_rng_state
from ppo_core.models.critic import ActorCritic
from ppo_core.models.files.rollout_files import KeptRollout, kept_tensors
from ppo_core.models.kernels.cpu_memory import release_freed_memory
from ppo_core.ppo.ema import WeightAverage
from ppo_core.ppo.experience import describe_broken, divergence, make_experience, shaped_scores
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.optimizer import make_train_state
from ppo_core.ppo.policy_sampler import PolicySampler, PromptBatch, draw_prompts
from ppo_core.ppo.ptx import PretrainingTexts
from ppo_core.ppo.run_state import PendingUpdate, RunContext, RunState
from ppo_core.ppo.schedule import make_schedule
from ppo_core.ppo.scoring import score
from ppo_core.ppo.update import UpdateProgress, update_policy
from ppo_core.reporting.callbacks import CallbackOrType, Reporter
from ppo_core.reporting.diagnosis import diagnose
from ppo_core.reporting.metrics import (
    Metrics,
    PhaseTimer,
    explained_variance,
    objective_metrics,
    update_metrics,
)
from ppo_core.reporting.metrics_file import UPDATE
from ppo_core.reporting.sample_table import NUM_NEWEST, Completions, log_table, print_table
from ppo_core.rollout.token_sampling import SamplingSettings, stop_token
from ppo_core.training.answer_prompts import greedy_completions
from ppo_core.training.critic_fit import NUM_KEPT, CriticFit
from ppo_core.training.export import PolicyExporter
from ppo_core.training.preflight import check_models
from ppo_core.training.self_check import SelfCheck, check_numbers

LESS_MEMORY = (
    "If this happened in sampling or scoring, lower local_rollout_forward_batch_size. If it "
    "happened in the update, lower max_tokens_per_microbatch or per_device_train_batch_size; with "
    "the latter, raise gradient_accumulation_steps by the same factor if batch_size is not set. "
    "You can also set gradient_checkpointing=True, or sharding to zero2, zero3 or fsdp2; if "
    "sharding is not enough, add offload=True. All these settings change results only by rounding, "
    "so the run can resume with them. If memory is still too small, train LoRA adapters in a new "
    "run."
)
"""Advice in the error of a training that ran out of memory."""

ROWS_SHOWN = 5
"""Number of printed rows of a table of samples; the file of the table contains all rows."""

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a policy with PPO to increase rewards; a KL term keeps the policy near a reference.

    `step` runs one update. The methods after `step` are the phases of an update, in order. `train`
    runs all updates.

    Args:
        config: the settings, as `join_processes` returns them.
        models: the models, as `set_up_models` returns them; policy and critic are trained in place.
        prompts: the prompts, as `make_run_prompts` returns them.
        engine: the processes of the run.
        callbacks: transformers' callbacks; one step in a callback is one PPO update.
        callback_model: the model that callbacks get; if None, the policy.
        optimizers: optimizer and learning-rate scheduler; (None, None) makes AdamW and the
            schedule of the settings.
        pretraining: texts for `ptx_coef`.
        earlier_rollouts: rollouts kept by the run that trained the critic; see `CriticFit`.
        keeps_rollouts: whether to keep the first rollouts for `save_critic`.

    Raises:
        ConfigError: settings contradict each other, the models, or the prompts.
        ModelError: a model cannot be used as policy, reference, critic or reward.
    """

    def step(self) -> Metrics:
        """Run one PPO update, or the rest of an interrupted update; return the update's metrics.

        Raises:
            RunInterruptedError: a process received SIGTERM; raised in all processes. Call step()
                again to continue this update.
            TrainingError: too many consecutive optimizer steps were skipped.
        """
        run = self._run
        if run.pending is None:
            with self._undone_if_interrupted():
                prompts = self._draw_prompts()
                rollout = self._sample(prompts)
                scores = self._score(rollout, prompts)
                run.pending = self._make_experience(rollout, scores, prompts)
        if self.engine.device.type == "cpu":
            release_freed_memory()
        with self._timer("updating"):
            sums = update_policy(
                self._train_state,
                run.pending.experience,
                self.config,
                run.pending.progress,
                critic_only=self._trains_only_the_critic,
                before_step=self._stop_if_interrupted,
            )
        return self._finish_update(run.pending, sums)

    @property
    def _trains_only_the_critic(self) -> bool:
        return self._run.updates < self.config.critic_warmup_updates

    def _draw_prompts(self) -> PromptBatch:
        return draw_prompts(
            self._run,
            self._prompts.training,
            self.engine,
            size=self.schedule.batch_size,
            response_length=self.config.response_length,
        )

    def _sample(self, prompts: PromptBatch) -> Rollout:
        with self._timer("sampling"):
            return self._sampler.sample(prompts, pause=self._stop_if_interrupted)

    def _score(self, rollout: Rollout, prompts: PromptBatch) -> Scores:
        self._stop_if_interrupted()
        module = self._train_state.module
        with self._timer("scoring"):
            return score(
                rollout,
                prompts.prompts,
                self._models,
                module,
                self.engine,
                self.config,
                prompts.columns,
            )

    def _make_experience(
        self, rollout: Rollout, scores: Scores, prompts: PromptBatch
    ) -> PendingUpdate:
        """Gather rollout and scores of all processes, and compute advantages and metrics.

        The experience is None if a score is not finite. All processes then skip the batch.
        """
        run, config, kl_coef = self._run, self.config, self._run.kl_coef(self.config)
        if self.engine.is_main:
            self._newest: Completions | None = self._newest_samples(rollout, scores, prompts)
        size, gather = self.schedule.batch_size, self.engine.gather_record
        rollout, scores = gather(rollout, size), gather(scores, size)
        kl = divergence(rollout, scores, config.kl_estimator)
        experience = None
        if bool(scores.scores.isfinite().all()):
            if run.reward_moments is not None:
                scores = self.rewards.scaled(scores, run.reward_moments)
            shaped = shaped_scores(scores.scores, rollout, config, run.moments)
            scores = replace(scores, scores=shaped)
            experience = make_experience(rollout, scores, kl, config, kl_coef=kl_coef)
            if run.first_rollouts is not None and run.updates < NUM_KEPT:
                given = [self._prompts.training.prompts[row] for row in prompts.rows]
                run.first_rollouts.append(kept_tensors(rollout, given))
        elif self.engine.is_main:
            shown = [self._prompts.training.prompts[row] for row in prompts.rows]
            logger.warning(describe_broken(scores.scores, shown, rollout, self.tokenizer))
        metrics = objective_metrics(rollout, scores, kl, kl_coef=kl_coef) | self._timer.pop()
        metrics |= self._sampler.metrics(rollout)
        metrics["lr"] = float(self._train_state.scheduler.get_last_lr()[0])
        progress = UpdateProgress.at_start(config, len(rollout), run.generators["shuffling"])
        return PendingUpdate(experience=experience, metrics=metrics, progress=progress)

    def _newest_samples(
        self, rollout: Rollout, scores: Scores, prompts: PromptBatch
    ) -> Completions:
        """Return the first responses of this process, for a person who watches the training."""
        few = slice(NUM_NEWEST)
        return Completions(
            [prompt_text(self.tokenizer, prompt) for prompt in prompts.prompts[few]],
            response_texts(self.tokenizer, map_tensors(rollout, lambda tensor: tensor[few])),
            scores.scores[few].tolist(),
        )

    def _finish_update(self, pending: PendingUpdate, sums: TokenSums) -> Metrics:
        """Count the update; then update KL coefficient, averaged weights and reference."""
        state, metrics, times = self._train_state, pending.metrics, self._timer.pop()
        if pending.experience is not None:
            has_critic = self.critic is not None
            metrics = metrics | update_metrics(sums, has_critic=has_critic)
            if has_critic:
                metrics["val/explained_variance"] = explained_variance(pending.experience)
            metrics |= times
        self._run.health.check_skipped(state.skipped_in_a_row)
        metrics = metrics | {"val/skipped_steps": float(state.skipped_steps)}
        run, config = self._run, self.config
        run.pending = None
        # While only the critic is trained, the coefficient does not affect the divergence.
        if run.adaptive_kl is not None and not self._trains_only_the_critic:
            run.adaptive_kl.update(metrics["objective/kl"], self.schedule.batch_size)
        run.updates += 1
        run.episodes += self.schedule.batch_size
        if self._average is not None:
            self._average.update()
        every = config.reference_refresh_updates
        if every and run.updates % every == 0:
            self.engine.copy_weights(self.policy, self.reference)
        return metrics | {"episode": float(run.episodes)}

    @contextmanager
    def _undone_if_interrupted(self) -> Iterator[None]:
        """On SIGTERM, restore counters and random states, so a resumed run draws the same batch."""
        before, randomness = self._run.as_checkpoint(), global_rng_state()
        try:
            yield
        except RunInterruptedError:
            self._run.restore(*before)
            restore_global_rng_state(*randomness)
            self._timer.pop()
            raise

    def _stop_if_interrupted(self) -> None:
        """Stop all processes if any process received SIGTERM.

        Raises:
            RunInterruptedError: a process received SIGTERM; raised in all processes.
        """
        if self.engine.any(self._interruption.requested):
            next_move = "No checkpoint was saved, because save_strategy='no'."
            if self._must_fit_critic:
                next_move = "No checkpoint was saved, because the critic was being fitted."
            elif self.config.save_strategy != "no":
                next_move = (
                    f"To resume from the checkpoint in '{self.config.output_dir}', start the run "
                    "again with --resume_from_checkpoint latest, or in Python with "
                    "resume_from_checkpoint=True."
                )
            raise RunInterruptedError(
                f"Training stopped after SIGTERM in update {self._run.updates + 1} of "
                f"{self.schedule.num_updates}. {next_move}"
            )

    # --- The run ---

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        *,
        resume_anyway: bool = False,
        stop_after_updates: int | None = None,
    ) -> list[Metrics]:
        """Run all remaining updates; return the metrics of each update.

        With `stop_after_updates`, the run saves a checkpoint and pauses after this number of
        updates, counted from the start of the run. The learning-rate schedule is still the schedule
        of the full run.

        `resume_from_checkpoint` is the folder of a checkpoint, or True for the newest undamaged
        checkpoint in `output_dir`. If `output_dir` has no checkpoint, True starts a new run. With
        `resume_anyway`, differences in settings or models only cause a warning.

        Raises:
            ConfigError: `stop_after_updates` is below 1, the run would pause without a checkpoint,
                or `output_dir` has checkpoints of an earlier run although `resume_from_checkpoint`
                is not given.
            RunInterruptedError: a process received SIGTERM. A checkpoint was written, unless
                save_strategy is "no" or the critic was being fitted.
            TrainingError: too many consecutive steps were skipped, the run cannot resume from the
                checkpoint, or memory is full.
        """
        if stop_after_updates is not None and stop_after_updates < 1:
            raise ConfigError(f"stop_after_updates={stop_after_updates} must be at least 1.")
        last = min(self.schedule.num_updates, stop_after_updates or self.schedule.num_updates)
        if stop_after_updates and self.config.save_strategy == "no":
            raise ConfigError(
                f"stop_after_updates={stop_after_updates} needs a checkpoint to continue from, and "
                "save_strategy='no' writes none. Remove either setting."
            )
        self._checkpoints.start(resume_from_checkpoint, anyway=resume_anyway)
        self._files.require_earlier(self._earlier)
        self._reporter.begin()
        with self._interruption, explained_out_of_memory(LESS_MEMORY):
            try:
                history = self._run_updates(last)
            except RunInterruptedError:
                # While the critic is fitted, no checkpoint is written: the next process repeats
                # the fit.
                if self.config.save_strategy != "no" and not self._must_fit_critic:
                    self._checkpoints.save()
                    self._checkpoints.finish()
                raise
        self.is_done = True
        self._checkpoints.finish()
        self._reporter.end()
        if self.engine.is_main:
            self._log_findings(history)
        return history

    def _run_updates(self, last: int) -> list[Metrics]:
        history = []
        run = self._run
        if run.updates == 0 and self.config.num_sample_generations > 0 and not run.has_first_table:
            self.generate_completions()
            run.has_first_table = True
        with self._progress() as bar:
            self._fit_critic()
            started, episodes_before = time.monotonic(), self._run.episodes
            for _ in range(self._run.updates, last):
                self._reporter.step_begin()
                metrics = self.step()
                # Check before any file is written: another process may have taken over output_dir.
                self._checkpoints.check_writer()
                seconds = time.monotonic() - started
                metrics["eps"] = (self._run.episodes - episodes_before) / seconds
                history.append(metrics)
                self._after_update(metrics, last)
                bar.set_postfix(
                    score=f"{metrics['objective/scores']:z.2f}",
                    kl=f"{metrics['objective/kl']:z.2f}",
                    refresh=False,
                )
                bar.update(self.schedule.batch_size)
                # If a callback of one process wants to stop, all processes leave the loop.
                if self.engine.any(self._reporter.should_stop):
                    break
        return history

    def _fit_critic(self) -> None:
        """Fit the critic to this run's rewards, if an earlier run has kept rollouts for that."""
        if self._must_fit_critic:
            fit = CriticFit(
                config=self.config,
                engine=self.engine,
                rewards=self.rewards,
                train_state=self._train_state,
            )
            fit.run(self._earlier_rollouts, self._stop_if_interrupted)
            self._run.critic_fit_is_over = True

    @property
    def _must_fit_critic(self) -> bool:
        run = self._run
        return bool(self._earlier_rollouts) and run.updates == 0 and not run.critic_fit_is_over

    def _after_update(self, metrics: Metrics, last: int) -> None:
        """Log warnings and metrics; evaluate, show samples and save if the settings ask for it.

        Unless save_strategy is "no", also save after update number `last`, and if a callback stops
        the run.
        """
        if self.engine.is_main:
            for finding in self._run.health.check(metrics):
                logger.warning("%s", replace(finding, update=self._run.updates))
        if self._newest is not None:
            self._reporter.show_samples(self._newest)
        self._reporter.step_end(metrics, epoch=self._run.episodes / len(self._prompts.training))
        if self.engine.any(self._reporter.should_evaluate) and self._prompts.evaluation is not None:
            self.evaluate()
        # Show samples at most `num_sample_generations` times, at equal intervals up to the end.
        due = self._run.updates * self.config.num_sample_generations
        if due % self.schedule.num_updates < self.config.num_sample_generations:
            self.generate_completions()
        # Save the policies of `save_policies` before the checkpoint: a run that resumes from the
        # checkpoint needs all of them.
        self._files.save_earlier(self._earlier)
        # Save last: a reward function may draw random numbers for the samples above, and the
        # checkpoint must contain the random states after these draws.
        ends = self._run.updates == last or self._reporter.should_stop
        saves = self._reporter.should_save or (ends and self.config.save_strategy != "no")
        if self.engine.any(saves):
            self._checkpoints.save()
            if self._reporter.handles_checkpoints:
                self._checkpoints.finish()
            self._reporter.saved()

    def _log_findings(self, history: list[Metrics]) -> None:
        """Log what was wrong in the run; without a metrics file, judge only the given `history`."""
        first = self._run.updates - len(history) + 1
        numbered = [{UPDATE: n, **metrics} for n, metrics in enumerate(history, first)]
        for finding in diagnose(self.config, self._reporter.updates() or numbered):
            logger.warning("What was wrong in this training: %s", finding)

    # --- What a run shows and saves ---

    def generate_completions(self, sampling: bool = False) -> Completions | None:
        """Decode responses to the evaluation prompts greedily, score them, and print a table.

        With `sampling`, only the first `per_device_eval_batch_size` prompts are used. Return None
        if there are no evaluation prompts.
        """
        if self._prompts.evaluation is None:
            return None
        prompts = self._prompts.evaluation
        if sampling:
            prompts = prompts.first(self.config.per_device_eval_batch_size)
        completions = self._answer(prompts)
        if self.engine.is_main:
            print_table(completions, f"Samples after update {self._run.updates}", limit=ROWS_SHOWN)
            log_table(
                completions,
                step=self._run.updates,
                callbacks=self._reporter.callbacks,
                output_dir=self.config.output_dir,
            )
        return completions

    def evaluate(self) -> Metrics:
        """Answer the evaluation prompts greedily; log and return the mean score "eval/scores".

        Raises:
            ConfigError: there are no evaluation prompts.
        """
        return self._evaluate(self._prompts.evaluation)

    def _evaluate(self, prompts: PromptSet | None) -> Metrics:
        if prompts is None:
            raise ConfigError("There are no prompts to evaluate. Pass an eval_dataset.")
        completions = self._answer(prompts)
        metrics = {"eval/scores": sum(completions.scores) / len(completions)}
        self._reporter.log(metrics)
        self._reporter.evaluated(metrics)
        return metrics

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Save policy and tokenizer in transformers' format, with the weights as safetensors.

        An adapter is merged into its base model, and also saved separately in the folder
        "adapter". With `ema_decay`, the averaged weights are saved. If `push_to_hub` is set and the
        argument `output_dir` is None, the policy is also uploaded.
        """
        self._files.save_policy(Path(output_dir or self.config.output_dir))
        if self.config.push_to_hub and output_dir is None:
            self._files.push("The policy after training")

    def save_critic(self, folder: Path) -> None:
        """Save the critic for `load_critic`; call `require_whole_critic` first."""
        self._files.save_critic(folder)

    def _answer(self, prompts: PromptSet) -> Completions:
        averaged = self._average.swapped_in() if self._average else nullcontext()
        with averaged, self.engine.autocast():
            return greedy_completions(
                self._models,
                self._train_state,
                self.tokenizer,
                prompts,
                response_length=self.config.response_length,
                stop_token_id=self._sampler.settings.stop_token_id,
                batch_size=self.config.per_device_eval_batch_size,
                moments=self._run.reward_moments,
            )

    # --- Setting up ---

    def __init__(
        self,
        config: PPOConfig,
        models: ModelBundle,
        prompts: RunPrompts,
        *,
        engine: Engine,
        callbacks: Sequence[CallbackOrType] = (),
        callback_model: nn.Module | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        pretraining: PretrainingTexts | None = None,
        earlier_rollouts: Sequence[KeptRollout] = (),
        keeps_rollouts: bool = False,
    ) -> None:
        """Check models, prompts and settings, and set up the run."""
        self.config, self.engine, self.tokenizer = config, engine, prompts.tokenizer
        self.policy, self.reference, self.critic = models.policy, models.reference, models.critic
        self.rewards = models.rewards
        self._models, self._prompts = models, prompts
        self.self_check = self._check_models()
        num_prompts = len(prompts.training)
        self.schedule = make_schedule(
            config, num_prompts=num_prompts, num_processes=engine.num_processes
        )
        self._earlier = self.schedule.between(config.save_policies)
        self._run = RunState.at_start(config, self.schedule, num_prompts)
        self._run.first_rollouts = [] if keeps_rollouts else None
        self._earlier_rollouts = earlier_rollouts
        self._train_state = make_train_state(
            config,
            ActorCritic(self.policy, self.critic),
            self.reference,
            self.schedule,
            engine,
            *optimizers,
            pretraining=pretraining,
        )
        # The engine has moved the base of these heads to the device.
        self.rewards.move_adapter_heads(engine.device)
        self._average = WeightAverage(self.policy, config.ema_decay) if config.ema_decay else None
        self._reporter = self._make_reporter(callbacks, callback_model)
        digest = prompts.training.digest()
        fingerprint = ppo_fingerprint(config, self.schedule, digest, models.fingerprints)
        # Replace total_episodes after the fingerprint, which uses the setting as it was given.
        self.config = replace(config, total_episodes=self.schedule.total_episodes)
        context = vars(self._context())
        self._files = PolicyExporter(**context)
        contents = CheckpointContents(**context, fingerprint=fingerprint)
        self._checkpoints = Checkpointer(contents, self._save_plan(), FORMS)
        self._timer = PhaseTimer()
        self._sampler = self._make_sampler()
        self._interruption = Interruption()
        self._newest = None
        self.is_done = False
        """Whether `train` has finished its updates."""

    def _check_models(self) -> SelfCheck:
        for prompts in (self._prompts.training, self._prompts.evaluation):
            if prompts is not None:
                check_models(self._models, prompts, self.tokenizer, self.config)
        tokens, is_here = self._prompts.training.tokens, not self.config.use_vllm
        return check_numbers(self._models, tokens, self.engine, samples_here=is_here)

    def _make_reporter(
        self, callbacks: Sequence[CallbackOrType], model: nn.Module | None
    ) -> Reporter:
        return Reporter(
            self.config,
            callbacks=callbacks,
            model=model or self._models.adapted or self.policy.model,
            tokenizer=self.tokenizer,
            optimizer=self._train_state.optimizer,
            scheduler=self._train_state.scheduler,
            num_updates=self.schedule.num_updates,
            is_main=self.engine.is_main,
        )

    def _save_plan(self) -> SavePlan:
        return SavePlan(
            folder=Path(self.config.output_dir),
            saves=self.config.save_strategy != "no",
            keep=self.config.save_total_limit,
            in_background=self.config.async_save,
            timeout=self.config.ddp_timeout,
        )

    def _context(self) -> RunContext:
        return RunContext(
            config=self.config,
            tokenizer=self.tokenizer,
            models=self._models,
            engine=self.engine,
            train_state=self._train_state,
            run=self._run,
            reporter=self._reporter,
            average=self._average,
        )

    def _make_sampler(self) -> PolicySampler:
        return PolicySampler(
            config=self.config,
            models=self._models,
            module=self._train_state.module,
            engine=self.engine,
            settings=SamplingSettings(
                stop_token_id=stop_token(
                    self.tokenizer, self.config.stop_token, self.config.stop_token_id
                ),
                temperature=self.config.temperature,
                top_k=self.config.top_k,
                top_p=self.config.top_p,
            ),
            prompts=self._prompts.training,
            timer=self._timer,
        )

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        total = self.schedule.total_episodes
        hidden = self.config.disable_tqdm or not self.engine.is_main
        with progress(total, "ppo", "episode", hidden=hidden) as bar:
            bar.update(self._run.episodes)
            with listening(PhaseLines(bar)):
                yield bar
