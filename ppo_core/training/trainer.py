"""The loop of PPO, nothing else."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from ppo_core.checkpointing.checkpointer import Checkpointer
from ppo_core.checkpointing.contents import CheckpointContents
from ppo_core.checkpointing.fingerprint import Fingerprint, given_models, layout
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompt_set import Collator, PromptSet, make_prompt_set
from ppo_core.data.types import map_tensors
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.interruption import Interruption
from ppo_core.errors import ConfigError, RunInterruptedError
from ppo_core.models.actor_critic import ActorCritic
from ppo_core.models.adapters import adapter_settings
from ppo_core.ppo.collector import Collector
from ppo_core.ppo.ema import WeightAverage
from ppo_core.ppo.optimizer import make_train_state
from ppo_core.ppo.ptx import make_pretraining_texts
from ppo_core.ppo.random_state import global_rng_state, restore_global_rng_state
from ppo_core.ppo.reward_functions import make_rewards
from ppo_core.ppo.run_state import PendingUpdate, RunState
from ppo_core.ppo.schedule import make_schedule
from ppo_core.ppo.update import update_policy
from ppo_core.reporting.callbacks import CallbackOrType, Reporter
from ppo_core.reporting.metrics import Metrics, explained_variance, update_metrics
from ppo_core.reporting.progress_bar import progress
from ppo_core.reporting.sample_table import Completions, log_table, print_table
from ppo_core.rollout.sampler import SamplingSettings, stop_token
from ppo_core.training.evaluation import greedy_completions
from ppo_core.training.export import PolicyExporter
from ppo_core.training.model_setup import make_models, require_loaded
from ppo_core.training.precision import trains_in_bf16
from ppo_core.training.preflight import check_models

ROWS_SHOWN = 5
"""Rows of a table of samples that are printed; its file has all."""

logger = logging.getLogger(__name__)


class PPOTrainer:
    """Trains a policy against rewards, held near a reference by the KL divergence."""

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
        """Take the models; `model` and `value_model` are trained in place.

        A script on a CPU calls `ppo_core.models.kernels.cpu_memory.prepare_cpu_process()` first to
        get the memory settings of `python -m ppo_core`; the trainer changes none of the process.

        Args:
            args: the settings.
            processing_class: the policy's tokenizer. It needs no pad token.
            model: the policy: a causal language model, one with a value head, or a PeftModel.
            ref_model: the reference; None copies the policy, or turns its adapter off.
            reward_model: a `RewardModel`, a `...ForSequenceClassification`, a function of
                prompts and responses, or several as a list or a dict.
            train_dataset: prompts: a list, or a data set with the column "prompt" (text or
                chat messages), "messages" or "input_ids".
            value_model: the critic, a `...ForSequenceClassification` or a `Critic`; None
                starts it from the reward model, else from the policy.
            data_collator: gives a row's "input_ids", for rows that are none of the above.
            eval_dataset: prompts that sample completions and evaluations answer.
            optimizers: optimizer and learning-rate scheduler in the place of AdamW's.
            callbacks: transformers' callbacks; one of their steps is one PPO update.
            peft_config: makes an adapter of `model` what is trained.
            pretrain_dataset: texts for `ptx_coef`.

        Raises:
            ConfigError: settings contradict each other or what was handed over.
            ModelError: a model cannot play its part.
            DataError: a prompt cannot be used.
        """
        require_loaded(model, ref_model=ref_model, value_model=value_model)
        # Settled first: a run that goes on elsewhere is of the same precision, or is refused.
        in_bf16 = trains_in_bf16(args.bf16, model, use_cpu=args.use_cpu)
        self.args = args = replace(args, bf16=in_bf16)
        self.processing_class = processing_class
        self.engine = Engine(
            bf16=in_bf16,
            use_cpu=args.use_cpu,
            sharding=args.sharding,
            offload=args.offload,
            deepspeed=args.deepspeed,
            gather_for_generation=args.ds3_gather_for_generation,
            timeout=args.ddp_timeout,
        )
        self.rewards = make_rewards(
            reward_model,
            processing_class,
            batch_size=args.local_rollout_forward_batch_size,
            weights=args.reward_weights,
        )
        models = given_models(
            model,
            ref_model,
            self.rewards.models(),
            adds_adapter=peft_config is not None,
        )
        parts = make_models(
            args,
            processing_class,
            model,
            ref_model,
            self.rewards,
            value_model,
            peft_config,
            self.engine,
        )
        self.policy, self.reference, self.critic = parts.policy, parts.reference, parts.critic
        self._train_set = self._read_prompts(train_dataset, data_collator)
        self._eval_set = None
        if eval_dataset is not None:
            self._eval_set = self._read_prompts(eval_dataset, data_collator)
        elif args.eval_strategy != "no":
            raise ConfigError(
                f"eval_strategy={args.eval_strategy!r} needs an eval_dataset. Hand one over, or "
                "set eval_strategy='no'."
            )
        for prompts in (self._train_set, self._eval_set):
            if prompts is not None:
                check_models(parts, prompts, processing_class, args)
        self.schedule = make_schedule(
            args, num_prompts=len(self._train_set), num_processes=self.engine.num_processes
        )
        self._run = RunState.at_start(args, self.schedule, len(self._train_set))
        trained = ActorCritic(self.policy, self.critic)
        models["policy or critic"] = layout(trained)
        if parts.adapted is not None:
            models["adapter"] = adapter_settings(parts.adapted)
        self._train_state = make_train_state(
            args,
            trained,
            self.reference,
            self.schedule,
            self.engine,
            *optimizers,
            pretraining=make_pretraining_texts(
                pretrain_dataset, processing_class, self.policy.model.config, args
            ),
        )
        self._average = WeightAverage(self.policy, args.ema_decay) if args.ema_decay else None
        self._reporter = Reporter(
            args,
            callbacks=callbacks or [],
            model=self._train_state.module,
            tokenizer=processing_class,
            optimizer=self._train_state.optimizer,
            scheduler=self._train_state.scheduler,
            num_updates=self.schedule.num_updates,
            is_main=self.engine.is_main,
        )
        self._files = PolicyExporter(
            config=args,
            tokenizer=processing_class,
            parts=parts,
            engine=self.engine,
            train_state=self._train_state,
            reporter=self._reporter,
            average=self._average,
        )
        contents = CheckpointContents(
            config=args,
            tokenizer=processing_class,
            parts=parts,
            engine=self.engine,
            train_state=self._train_state,
            run=self._run,
            reporter=self._reporter,
            average=self._average,
            identity=Fingerprint.of(args, self.schedule, self._train_set.digest(), models),
        )
        self._checkpoints = Checkpointer(contents)
        self._sampling = SamplingSettings(
            stop_token_id=stop_token(processing_class, args.stop_token, args.stop_token_id),
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
        )
        self._collector = Collector(
            config=args,
            tokenizer=processing_class,
            parts=parts,
            module=self._train_state.module,
            engine=self.engine,
            prompts=self._train_set,
            schedule=self.schedule,
            sampling=self._sampling,
        )
        self._interruption = Interruption()

    @property
    def model(self) -> nn.Module:
        """The policy as transformers knows it."""
        return self._files.trained_model

    @property
    def state(self) -> TrainerState:
        """Transformers' state of the run: steps, and the history of what was logged."""
        return self._reporter.state

    @property
    def accelerator(self) -> Any:
        """What accelerate knows of the processes: device, process_index, is_main_process, ..."""
        return self.engine.accelerator

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that writes and talks."""
        return self.engine.is_main

    def add_callback(self, callback: CallbackOrType) -> None:
        """Call one more of transformers' callbacks."""
        self._reporter.add_callback(callback)

    def remove_callback(self, callback: CallbackOrType) -> None:
        """Call it no longer."""
        self._reporter.remove_callback(callback)

    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        *,
        resume_anyway: bool = False,
    ) -> list[Metrics]:
        """Run all updates that are left; returns the metrics of each.

        `resume_from_checkpoint` is a checkpoint's folder, or True for the newest in `output_dir`
        whose files are as they were written, where there is one. With `resume_anyway` it may be
        of other settings or models, which are then a warning.

        Raises:
            RunInterruptedError: SIGTERM came. A checkpoint was written, unless save_strategy is
                "no".
            TrainingError: too many steps in a row were skipped, or the checkpoint cannot be
                resumed from.
        """
        self._checkpoints.start(resume_from_checkpoint, anyway=resume_anyway)
        self._reporter.begin()
        with self._interruption:
            try:
                history = self._run_updates()
            except RunInterruptedError:
                if self.args.save_strategy != "no":
                    self._checkpoints.save()
                    self._checkpoints.finish()
                raise
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
                # Before anything is written: this process may have been frozen meanwhile.
                self._checkpoints.check_writer()
                seconds = time.monotonic() - started
                metrics["eps"] = (self._run.episodes - episodes_before) / seconds
                history.append(metrics)
                self._after_update(metrics)
                bar.set_postfix(
                    score=f"{metrics['objective/scores']:.2f}",
                    kl=f"{metrics['objective/kl']:.2f}",
                    refresh=False,
                )
                bar.update(self.schedule.batch_size)
                # A callback of one process may want to stop; all leave the loop together.
                if self.engine.any(self._reporter.should_stop):
                    break
        return history

    def step(self) -> Metrics:
        """One update: sample, score, learn; or what is left of one that was interrupted.

        Raises:
            RunInterruptedError: SIGTERM came. The update can be gone on with.
            TrainingError: too many steps in a row were skipped.
        """
        run = self._run
        if run.pending is None:
            run.pending = self._collect()
        metrics = run.pending.metrics | self._learn(run.pending)
        run.pending = None
        run.updates += 1
        run.episodes += self.schedule.batch_size
        self._follow(metrics["objective/kl"])
        return metrics | {"episode": float(run.episodes)}

    def generate_completions(self, sampling: bool = False) -> Completions | None:
        """Answer the evaluation prompts greedily, score the answers, and show them as a table.

        All prompts are answered; with `sampling` the first `per_device_eval_batch_size` alone,
        for a quick look. None without an evaluation set.
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

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write policy and tokenizer as transformers reads them, weights as safetensors.

        An adapter is merged into its base, and kept beside it in the folder "adapter". With
        `ema_decay` it is the running mean that is written. With the setting `push_to_hub` what
        is written to the run's own `output_dir` is uploaded.
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
        """Save the policy with its model card and upload it; the repository's address."""
        self._files.save_policy(Path(self.args.output_dir))
        return self._files.push(commit_message, **details)

    # --- The phases of an update ---

    def _collect(self) -> PendingUpdate:
        """Sample and score the next batch."""
        run = self._run
        kl_coef = run.adaptive_kl.kl_coef if run.adaptive_kl else self.args.kl_coef
        before, randomness = run.as_checkpoint(), global_rng_state()
        try:
            pending = self._collector.collect(run, kl_coef=kl_coef, pause=self._pause)
        except RunInterruptedError:
            # As if it had not been begun: what was drawn for it is drawn again.
            run.restore(*before)
            restore_global_rng_state(*randomness)
            raise
        pending.metrics["lr"] = float(self._train_state.scheduler.get_last_lr()[0])
        return pending

    def _learn(self, pending: PendingUpdate) -> Metrics:
        """Move policy and critic, unless nothing can be learned from the batch."""
        train_state, experience = self._train_state, pending.experience
        metrics: Metrics = {}
        if experience is None:
            train_state.skip(self.schedule.steps_per_update)
        else:
            started = time.monotonic()
            experience = map_tensors(experience, lambda tensor: tensor.to(self.engine.device))
            # transformers recomputes activations in training mode alone; dropout is off anyway.
            train_state.module.train(self.args.gradient_checkpointing)
            update_policy(
                train_state,
                experience,
                self.args,
                self.engine,
                pending.progress,
                critic_only=self._run.updates < self.args.critic_warmup_updates,
                pause=self._pause,
            )
            train_state.module.eval()
            metrics = update_metrics(pending.progress.sums) | {
                "val/explained_variance": explained_variance(experience),
                "time/updating": time.monotonic() - started,
            }
        self._run.health.check_skipped(train_state.skipped_in_a_row)
        return metrics | {"val/skipped_steps": float(train_state.skipped_steps)}

    def _pause(self) -> None:
        """Go on, or stop here in all processes together if one of them was told to.

        Raises:
            RunInterruptedError: one was.
        """
        if self.engine.any(self._interruption.requested):
            further = "Nothing was saved, as save_strategy='no' says."
            if self.args.save_strategy != "no":
                further = (
                    "Start it again with --resume_from_checkpoint latest "
                    "(resume_from_checkpoint=True) to go on from the checkpoint in "
                    f"'{self.args.output_dir}'."
                )
            raise RunInterruptedError(
                f"SIGTERM: training stopped in update {self._run.updates + 1} of "
                f"{self.schedule.num_updates}. {further}"
            )

    def _follow(self, kl: float) -> None:
        """What follows the policy after an update: coefficient, running mean, reference."""
        if self._run.adaptive_kl is not None:
            self._run.adaptive_kl.update(kl, self.schedule.batch_size)
        if self._average is not None:
            self._average.update()
        every = self.args.reference_refresh_updates
        if every and self._run.updates % every == 0:
            self.engine.copy_weights(self.policy, self.reference)

    # --- What happens between updates ---

    def _after_update(self, metrics: Metrics) -> None:
        """Warn, log, evaluate, show samples and save, each when it is due."""
        if self.engine.is_main:
            for warning in self._run.health.check(metrics):
                logger.warning("Update %d. %s", self._run.updates, warning)
        self._reporter.step_end(metrics, epoch=self._run.episodes / len(self._train_set))
        if self.engine.any(self._reporter.should_evaluate) and self._eval_set is not None:
            self._evaluate(self._eval_set)
        # Evenly spread, the first update's among them, and never more often than asked for.
        due = (self._run.updates - 1) * self.args.num_sample_generations
        if due % self.schedule.num_updates < self.args.num_sample_generations:
            self.generate_completions()
        # Last: a reward that draws random numbers has drawn all of this update's.
        if self.engine.any(self._reporter.should_save):
            self._checkpoints.save()
            self._reporter.saved()

    def _evaluate(self, prompts: PromptSet) -> None:
        completions = self._answer(prompts)
        metrics = {"eval/scores": sum(completions.scores) / len(completions)}
        self._reporter.log(metrics)
        self._reporter.evaluated(metrics)

    def _answer(self, prompts: PromptSet) -> Completions:
        averaged = self._average.swapped_in() if self._average else nullcontext()
        with averaged, self.engine.autocast():
            return greedy_completions(
                self.policy,
                self._train_state.module,
                self.processing_class,
                prompts,
                self.rewards,
                self.engine,
                response_length=self.args.response_length,
                stop_token_id=self._sampling.stop_token_id,
                batch_size=self.args.per_device_eval_batch_size,
            )

    # --- Setting up ---

    def _read_prompts(self, dataset: Any, collator: Collator | None) -> PromptSet:
        return make_prompt_set(
            dataset, self.processing_class, self.policy.model, self.args, collator
        )

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        total = self.schedule.total_episodes
        hidden = self.args.disable_tqdm or not self.engine.is_main
        with progress(total, "ppo", "episode", hidden=hidden) as bar:
            bar.update(self._run.episodes)
            yield bar
