"""The training loop of PPO, with the public methods of TRL's PPOTrainer."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.checkpointing.checkpointer import Checkpointer, SavePlan
from ppo_core.checkpointing.contents import CheckpointContents
from ppo_core.checkpointing.ppo_fingerprint import ppo_fingerprint
from ppo_core.checkpointing.state_form import FORMS
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.unsupported_settings import own_copy, refuse_late_changes
from ppo_core.data.prompt_set import Collator, PromptSet, make_prompt_set
from ppo_core.data.types import Rollout, Scores
from ppo_core.distributed.interruption import Interruption
from ppo_core.errors import ConfigError, RunInterruptedError
from ppo_core.errors.out_of_memory import explained_out_of_memory
from ppo_core.io.progress_bar import PhaseLines, listening, progress
from ppo_core.models.actor_critic import ActorCritic
from ppo_core.models.kernels.freed_memory import release_freed_memory
from ppo_core.ppo.ema import WeightAverage
from ppo_core.ppo.experience import describe_broken, divergence, make_experience, shaped_scores
from ppo_core.ppo.optimizer import make_train_state
from ppo_core.ppo.ptx import make_pretraining_texts
from ppo_core.ppo.random_state import global_rng_state, restore_global_rng_state
from ppo_core.ppo.reward_functions import make_rewards
from ppo_core.ppo.run_state import PendingUpdate, RunContext, RunState
from ppo_core.ppo.sampling import PolicySampler, PromptBatch, draw_prompts
from ppo_core.ppo.schedule import batch_sizes, make_schedule
from ppo_core.ppo.scoring import score
from ppo_core.ppo.update import TrainState, UpdateProgress, update_policy
from ppo_core.reporting.callbacks import CallbackOrType, Reporter
from ppo_core.reporting.health import as_logged
from ppo_core.reporting.metrics import (
    Metrics,
    PhaseTimer,
    explained_variance,
    objective_metrics,
    update_metrics,
)
from ppo_core.reporting.sample_table import Completions, log_table, print_table
from ppo_core.rollout.sampler import SamplingSettings, stop_token
from ppo_core.training.evaluation import greedy_completions
from ppo_core.training.export import PolicyExporter
from ppo_core.training.model_setup import (
    ScriptModels,
    make_engine,
    make_models,
    require_equal_models,
    require_loaded,
    share_random_scores,
    trained_layouts,
)
from ppo_core.training.precision import trains_in_bf16
from ppo_core.training.preflight import check_models
from ppo_core.training.script_names import (
    PolicyAndValue,
    ScriptNames,
    add_computed,
    with_older_names,
)
from ppo_core.training.self_check import check_numbers

LESS_MEMORY = (
    "Lower local_rollout_forward_batch_size if this was in sampling or scoring, or "
    "per_device_train_batch_size or max_tokens_per_microbatch if it was in the update: no result "
    "depends on them. Or set gradient_checkpointing=True, or sharding to zero2, zero3 or fsdp2, "
    "with offload=True if that is not enough. Then resume with --resume_anyway "
    "(resume_anyway=True). Or train LoRA adapters in a new run."
)
"""What to do after a training that ran out of memory."""

ROWS_SHOWN = 5
"""Number of rows that are printed of a table of samples; the file has all rows."""

logger = logging.getLogger(__name__)


class PPOTrainer(ScriptNames):
    """Trains a policy with PPO to increase rewards; a KL term keeps the policy near a reference.

    The constructor does not change memory settings. To set them as `python -m ppo_core` does on a
    CPU, first call `ppo_core.models.kernels.cpu_memory.prepare_cpu_process()`.

    Args:
        args: the settings.
        processing_class: the policy's tokenizer. A pad token is not necessary.
        model: the policy, trained in place: a causal language model, with or without a value
            head, or a PeftModel.
        ref_model: the reference; None takes a copy of the policy, or its base without adapter.
        reward_model: a `RewardModel`, a `...ForSequenceClassification` or another module
            (`ppo_core.models.script_modules`), a function of prompts and responses, or several of
            these as a list or a dict.
        train_dataset: prompts as a list, or a data set with the column "prompt" (text or chat
            messages), "messages" or "input_ids".
        value_model: the critic, a `...ForSequenceClassification`, a `Critic` or another module
            that returns a value for each token, trained in place; None copies the reward model, or
            else the policy's backbone.
        data_collator: function that returns the "input_ids" of rows without these columns.
        eval_dataset: prompts for sample completions and evaluations.
        optimizers: optimizer and learning-rate scheduler; (None, None) makes AdamW and the
            schedule of the settings.
        callbacks: transformers' callbacks; a step of a callback is one PPO update.
        peft_config: settings of an adapter to add to `model`; of the policy, only the adapter is
            trained.
        pretrain_dataset: texts for `ptx_coef`.

    Raises:
        ConfigError: settings contradict each other, the models, or the data sets.
        ModelError: a model cannot be used as policy, reference, critic or reward.
        DataError: a prompt cannot be used.
    """

    @with_older_names
    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: nn.Module,
        ref_model: PreTrainedModel | None,
        reward_model: Any,
        train_dataset: Any,
        value_model: nn.Module | None = None,
        data_collator: Collator | None = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Sequence[CallbackOrType] | None = None,
        peft_config: Any = None,
        *,
        pretrain_dataset: Any = None,
    ) -> None:
        """Check models, prompts and settings, and set up the run."""
        require_loaded(model, ref_model=ref_model, value_model=value_model)
        self._given_args, self._args_before = args, asdict(args)
        # Resolve bf16 first, because the run's fingerprint includes this setting.
        in_bf16 = trains_in_bf16(args.bf16, model, use_cpu=args.use_cpu)
        self.engine = make_engine(replace(args, bf16=in_bf16))
        sizes = batch_sizes(args, self.engine.num_processes)
        self.args = args = own_copy(args, bf16=in_bf16, **sizes)
        self.processing_class = processing_class
        self.rewards = make_rewards(
            reward_model,
            processing_class,
            batch_size=args.local_rollout_forward_batch_size,
            weights=args.reward_weights,
            equal_passes=self.engine.requires_equal_passes(),
        )
        given = ScriptModels(model, ref_model, value_model, self.rewards, peft_config)
        scorers = [scorer.model for scorer in self.rewards.models()]
        share_random_scores([*scorers, value_model], self.engine)
        prints = given.fingerprints()
        require_equal_models(prints, self.engine)
        self._models = models = make_models(args, processing_class, given, self.engine)
        self.policy, self.reference, self.critic = models.policy, models.reference, models.critic
        self.model = PolicyAndValue(
            models.adapted or models.policy.model,
            models.critic if value_model is None else value_model,
        )
        self.ref_model = ref_model
        if ref_model is None and not models.shares_weights:
            self.ref_model = models.reference.model
        self.reward_model = reward_model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._collator = data_collator
        self._train_set = self._read_prompts(train_dataset)
        self._eval_set = self._read_eval_prompts(eval_dataset)
        self._check_models()
        self.schedule = make_schedule(
            args, num_prompts=len(self._train_set), num_processes=self.engine.num_processes
        )
        self._run = RunState.at_start(args, self.schedule, len(self._train_set))
        prints |= trained_layouts(models)
        self._train_state = self._make_train_state(optimizers, pretrain_dataset)
        self._average = WeightAverage(self.policy, args.ema_decay) if args.ema_decay else None
        self._reporter = self._make_reporter(callbacks or [])
        context = self._context()
        self._files = PolicyExporter(**vars(context))
        fingerprint = ppo_fingerprint(args, self.schedule, self._train_set.digest(), prints)
        contents = CheckpointContents(**vars(context), fingerprint=fingerprint)
        plan = SavePlan(
            folder=Path(args.output_dir),
            saves=args.save_strategy != "no",
            keep=args.save_total_limit,
            in_background=args.async_save,
            timeout=args.ddp_timeout,
        )
        self._checkpoints = Checkpointer(contents, plan, FORMS)
        add_computed(args, self._reporter.args, self.schedule, self.engine)
        self._timer = PhaseTimer()
        self._sampler = self._make_sampler()
        self._interruption = Interruption()
        self.is_done = False
        """Whether `train` has made its last update."""

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        *,
        resume_anyway: bool = False,
    ) -> list[Metrics]:
        """Run all remaining updates; return the metrics of each update.

        `resume_from_checkpoint` is the folder of a checkpoint, or True for the newest undamaged
        checkpoint in `output_dir`. If `output_dir` has no checkpoint, True starts a new run. With
        `resume_anyway`, differences in settings or models only cause a warning.

        Raises:
            RunInterruptedError: the process received SIGTERM. A checkpoint was written, unless
                save_strategy is "no".
            TrainingError: too many consecutive steps were skipped, the run cannot resume from the
                checkpoint, or memory is full.
            ConfigError: the settings were changed after the trainer was made.
        """
        refuse_late_changes(self._given_args, self._args_before)
        self._checkpoints.start(resume_from_checkpoint, anyway=resume_anyway)
        self._reporter.begin()
        with self._interruption, explained_out_of_memory(LESS_MEMORY):
            try:
                history = self._run_updates()
            except RunInterruptedError:
                if self.args.save_strategy != "no":
                    self._checkpoints.save()
                    self._checkpoints.finish()
                raise
        self.is_done = True
        self._checkpoints.finish()
        self._reporter.end()
        return history

    def _run_updates(self) -> list[Metrics]:
        history = []
        started, episodes_before = time.monotonic(), self._run.episodes
        with self._progress() as bar:
            for _ in range(self._run.updates, self.schedule.num_updates):
                self._reporter.step_begin()
                metrics = self.step()
                # Check before any file is written, because another process may have taken over.
                self._checkpoints.check_writer()
                seconds = time.monotonic() - started
                metrics["eps"] = (self._run.episodes - episodes_before) / seconds
                history.append(metrics)
                self._after_update(metrics)
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

    def step(self) -> Metrics:
        """Run one PPO update, or the rest of an interrupted update; return the update's metrics.

        Raises:
            RunInterruptedError: the process received SIGTERM. Call step() again to continue this
                update.
            TrainingError: too many consecutive optimizer steps were skipped.
        """
        run = self._run
        if run.pending is None:
            with self._undone_if_interrupted():
                prompts = self._draw_prompts()
                rollout = self._sample(prompts)
                scores = self._score(rollout, prompts)
                run.pending = self._make_experience(rollout, scores, prompts)
        metrics = run.pending.metrics | self._update(run.pending)
        return self._finish_update(metrics)

    def generate_completions(self, sampling: bool = False) -> Completions | None:
        """Decode responses to the evaluation prompts greedily, score them, and print a table.

        With `sampling` only the first `per_device_eval_batch_size` prompts are used. Return None
        if there are no evaluation prompts.
        """
        if self._eval_set is None:
            return None
        prompts = self._eval_set
        if sampling:
            first = self.args.per_device_eval_batch_size
            prompts = PromptSet(prompts.prompts[:first], prompts.tokens[:first])
        completions = self._answer(prompts)
        if self.engine.is_main:
            print_table(completions, f"Samples after update {self._run.updates}", limit=ROWS_SHOWN)
            log_table(
                completions,
                step=self._run.updates,
                callbacks=self._reporter.callbacks,
                output_dir=self.args.output_dir,
            )
        return completions

    def evaluate(self, eval_dataset: Any = None) -> Metrics:
        """Answer prompts greedily and score them; log and return the mean score "eval/scores".

        Raises:
            ConfigError: neither this method nor the trainer was given an `eval_dataset`.
        """
        prompts = self._eval_set
        if eval_dataset is not None:
            prompts = self._read_prompts(eval_dataset)
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
        "adapter". With `ema_decay` the averaged weights are saved. With `push_to_hub`, and without
        the argument `output_dir`, the policy is also uploaded.
        """
        self._files.save_policy(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and output_dir is None:
            self._files.push("The policy after training")

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Write README.md into `output_dir`, with the settings and the last metrics."""
        self._files.write_card(model_name=model_name, dataset_name=dataset_name, tags=tags)

    def push_to_hub(self, commit_message: str = "PPO", **details: Any) -> str | None:
        """Save and upload the policy with its model card; return the commit's URL."""
        self._files.save_policy(Path(self.args.output_dir))
        return self._files.push(commit_message, **details)

    # --- The phases of an update ---

    def _draw_prompts(self) -> PromptBatch:
        return draw_prompts(
            self._run,
            self._train_set,
            self.engine,
            size=self.schedule.batch_size,
            response_length=self.args.response_length,
        )

    def _sample(self, prompts: PromptBatch) -> Rollout:
        with self._timer("sampling"):
            return self._sampler.sample(prompts, pause=self._stop_if_interrupted)

    def _score(self, rollout: Rollout, prompts: PromptBatch) -> Scores:
        self._stop_if_interrupted()
        module = self._train_state.module
        with self._timer("scoring"):
            return score(rollout, prompts.prompts, self._models, module, self.engine, self.args)

    def _make_experience(
        self, rollout: Rollout, scores: Scores, prompts: PromptBatch
    ) -> PendingUpdate:
        """Gather rollout and scores of all processes, and compute advantages and metrics.

        The experience is None if a score is not finite. All processes then skip the batch.
        """
        run, args, kl_coef = self._run, self.args, self._run.kl_coef(self.args)
        size, gather = self.schedule.batch_size, self.engine.gather_record
        rollout, scores = gather(rollout, size), gather(scores, size)
        kl = divergence(rollout, scores, args.kl_estimator)
        experience = None
        if bool(scores.scores.isfinite().all()):
            shaped = shaped_scores(scores.scores, rollout, args, run.moments)
            scores = replace(scores, scores=shaped)
            experience = make_experience(rollout, scores, kl, args, kl_coef=kl_coef)
        elif self.engine.is_main:
            shown = [self._train_set.prompts[row] for row in prompts.rows]
            logger.warning(describe_broken(scores.scores, shown, rollout, self.processing_class))
        metrics = objective_metrics(rollout, scores, kl, kl_coef=kl_coef) | self._timer.pop()
        metrics |= self._sampler.metrics(rollout)
        metrics["lr"] = float(self._train_state.scheduler.get_last_lr()[0])
        progress = UpdateProgress.at_start(args, len(rollout), run.generators["shuffling"])
        return PendingUpdate(experience=experience, metrics=metrics, progress=progress)

    def _update(self, pending: PendingUpdate) -> Metrics:
        """Train policy and critic with the experience; if it is None, skip the batch."""
        state, experience = self._train_state, pending.experience
        metrics: Metrics = {}
        if experience is None:
            state.skip_batch(self.schedule.steps_per_update)
        else:
            if self.engine.device.type == "cpu":
                release_freed_memory()
            with self._timer("updating"):
                sums = update_policy(
                    state,
                    experience,
                    self.args,
                    pending.progress,
                    critic_only=self._run.updates < self.args.critic_warmup_updates,
                    before_step=self._stop_if_interrupted,
                )
            metrics = update_metrics(sums)
            metrics["val/explained_variance"] = explained_variance(experience)
            metrics |= self._timer.pop()
        self._run.health.check_skipped(state.skipped_in_a_row)
        return metrics | {"val/skipped_steps": float(state.skipped_steps)}

    def _finish_update(self, metrics: Metrics) -> Metrics:
        """Count the update; then update KL coefficient, averaged weights and reference."""
        run, args = self._run, self.args
        run.pending = None
        run.updates += 1
        run.episodes += self.schedule.batch_size
        if run.adaptive_kl is not None:
            run.adaptive_kl.update(metrics["objective/kl"], self.schedule.batch_size)
        if self._average is not None:
            self._average.update()
        every = args.reference_refresh_updates
        if every and run.updates % every == 0:
            self.engine.copy_weights(self.policy, self.reference)
        return metrics | {"episode": float(run.episodes)}

    @contextmanager
    def _undone_if_interrupted(self) -> Iterator[None]:
        """On SIGTERM, restore counters and random states, so that the next run draws this batch."""
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
            if self.args.save_strategy != "no":
                next_move = (
                    "To resume from the checkpoint in "
                    f"'{self.args.output_dir}', start the run again with --resume_from_checkpoint "
                    "latest (resume_from_checkpoint=True)."
                )
            raise RunInterruptedError(
                f"Training stopped after SIGTERM in update {self._run.updates + 1} of "
                f"{self.schedule.num_updates}. {next_move}"
            )

    # --- Between updates ---

    def _after_update(self, metrics: Metrics) -> None:
        """Log warnings and metrics; evaluate, show samples and save if the settings ask for it."""
        if self.engine.is_main:
            for warning in self._run.health.check(metrics):
                logger.warning("%s", as_logged(self._run.updates, warning))
        self._reporter.step_end(metrics, epoch=self._run.episodes / len(self._train_set))
        if self.engine.any(self._reporter.should_evaluate) and self._eval_set is not None:
            self.evaluate()
        # Show samples after the first update, and at most `num_sample_generations` times in all,
        # at equal intervals.
        due = (self._run.updates - 1) * self.args.num_sample_generations
        if due % self.schedule.num_updates < self.args.num_sample_generations:
            self.generate_completions()
        # Save last, because a reward function may have drawn random numbers for the samples above.
        if self.engine.any(self._reporter.should_save):
            self._checkpoints.save()
            self._reporter.saved()

    def _answer(self, prompts: PromptSet) -> Completions:
        averaged = self._average.swapped_in() if self._average else nullcontext()
        with averaged, self.engine.autocast():
            return greedy_completions(
                self._models,
                self._train_state,
                self.processing_class,
                prompts,
                response_length=self.args.response_length,
                stop_token_id=self._sampler.settings.stop_token_id,
                batch_size=self.args.per_device_eval_batch_size,
            )

    # --- Setting up ---

    def _read_prompts(self, dataset: Any) -> PromptSet:
        return make_prompt_set(
            dataset, self.processing_class, self.policy.model, self.args, self._collator
        )

    def _read_eval_prompts(self, dataset: Any) -> PromptSet | None:
        if dataset is not None:
            return self._read_prompts(dataset)
        if self.args.eval_strategy != "no":
            raise ConfigError(
                f"eval_strategy={self.args.eval_strategy!r} needs an eval_dataset. Pass an "
                "eval_dataset, or set eval_strategy='no'."
            )
        return None

    def _check_models(self) -> None:
        for prompts in (self._train_set, self._eval_set):
            if prompts is not None:
                check_models(self._models, prompts, self.processing_class, self.args)
        self.self_check = check_numbers(
            self._models,
            self._train_set.tokens,
            self.engine,
            samples_here=not self.args.use_vllm,
        )

    def _make_train_state(self, optimizers: tuple[Any, Any], pretrain_dataset: Any) -> TrainState:
        texts = make_pretraining_texts(
            pretrain_dataset, self.processing_class, self.policy.model.config, self.args
        )
        return make_train_state(
            self.args,
            ActorCritic(self.policy, self.critic),
            self.reference,
            self.schedule,
            self.engine,
            *optimizers,
            pretraining=texts,
        )

    def _make_reporter(self, callbacks: Sequence[CallbackOrType]) -> Reporter:
        return Reporter(
            self.args,
            callbacks=callbacks,
            model=self.model,
            tokenizer=self.processing_class,
            optimizer=self._train_state.optimizer,
            scheduler=self._train_state.scheduler,
            num_updates=self.schedule.num_updates,
            is_main=self.engine.is_main,
        )

    def _context(self) -> RunContext:
        return RunContext(
            config=self.args,
            tokenizer=self.processing_class,
            models=self._models,
            engine=self.engine,
            train_state=self._train_state,
            run=self._run,
            reporter=self._reporter,
            average=self._average,
        )

    def _make_sampler(self) -> PolicySampler:
        return PolicySampler(
            config=self.args,
            models=self._models,
            module=self._train_state.module,
            engine=self.engine,
            settings=SamplingSettings(
                stop_token_id=self._stop_token_id,
                temperature=self.args.temperature,
                top_k=self.args.top_k,
                top_p=self.args.top_p,
            ),
            prompts=self._train_set,
            timer=self._timer,
        )

    @property
    def _stop_token_id(self) -> int:
        return stop_token(self.processing_class, self.args.stop_token, self.args.stop_token_id)

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        total = self.schedule.total_episodes
        hidden = self.args.disable_tqdm or not self.engine.is_main
        with progress(total, "ppo", "episode", hidden=hidden) as bar:
            bar.update(self._run.episodes)
            with listening(PhaseLines(bar)):
                yield bar
