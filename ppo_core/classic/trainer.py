"""The trainer of the classic loop."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, set_seed

from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.classic.config import PPOConfig
from ppo_core.classic.data import Collator, shuffled_batches, without_unused_columns
from ppo_core.classic.generation import generate_responses, unrestricted
from ppo_core.classic.rows import Masks, check_scores, check_vectors, make_rollout
from ppo_core.classic.stats import Stats, guarded, numbers, step_stats, texts_table
from ppo_core.data.types import Experience, Record, Rollout, Scores, TokenSums, map_tensors
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, DataError, ModelError
from ppo_core.models.actor_critic import ActorCritic
from ppo_core.models.reference import create_reference_model
from ppo_core.models.value_head import (
    ModelWithValueHead,
)
from ppo_core.ppo.experience import divergence, make_experience, shaped_scores
from ppo_core.ppo.optimizer import check_optimizer, check_sharding
from ppo_core.ppo.reward_functions import RewardMix
from ppo_core.ppo.run_state import make_adaptive_kl
from ppo_core.ppo.scoring import critic_values, full_kl, reference_logprobs
from ppo_core.ppo.update import TrainState, UpdateProgress, update_policy
from ppo_core.reporting.callbacks import Reporter
from ppo_core.reporting.health import HealthMonitor
from ppo_core.reporting.sample_table import log_table
from ppo_core.training.model_card import push_folder, write_model_card
from ppo_core.training.model_setup import make_models

logger = logging.getLogger(__name__)


class PPOTrainer:
    """Takes PPO steps on responses that a script has sampled and scored."""

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: ModelWithValueHead | None = None,
        ref_model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Collator | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        training_data_collator: None = None,
    ) -> None:
        """Take the model, which is trained in place; torch is seeded with `config.seed`.

        Args:
            config: the settings.
            model: a model with a value head, causal or sequence-to-sequence.
            ref_model: the reference; None copies the policy, or turns its adapter off.
            tokenizer: the policy's.
            dataset: what `dataloader` gives batches of; None if the script has its own.
            optimizer: in the place of Adam.
            data_collator: makes a batch of the data set's rows; None makes lists by column.
            num_shared_layers: layers that policy and reference share, frozen, if there is no
                ref_model.
            lr_scheduler: steps once after each `step`; None keeps the learning rate.
            training_data_collator: not honoured; `step` pads its rows itself.

        Raises:
            ConfigError: arguments contradict each other, or one is not honoured.
            ModelError: a model cannot play its part.
            DataError: the data set is too small for one batch.
        """
        self.config = config or PPOConfig()
        _check_arguments(self.config, ref_model, num_shared_layers, training_data_collator)
        if not isinstance(model, ModelWithValueHead) or tokenizer is None:
            raise ModelError(
                f"model is a {type(model).__name__} and tokenizer a {type(tokenizer).__name__}; "
                "hand over AutoModelForCausalLMWithValueHead.from_pretrained(path), or its "
                "Seq2Seq sibling, and the policy's tokenizer."
            )
        set_seed(self.config.seed)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.engine = Engine()
        self._settings = self.config.of_update()
        if ref_model is None and num_shared_layers is not None:
            ref_model = create_reference_model(model, num_shared_layers=num_shared_layers)
        no_rewards = RewardMix({}, None)
        parts = make_models(
            self._settings, tokenizer, model, ref_model, no_rewards, None, None, self.engine
        )
        self.policy, self.reference, self.critic = parts.policy, parts.reference, parts.critic
        self.ref_model = ref_model or self.reference.model
        self.lr_scheduler = lr_scheduler
        self._train_state = self._make_train_state(optimizer)
        self._adaptive_kl = make_adaptive_kl(
            self._settings, self.config.batch_size * self.engine.num_processes
        )
        self._moments = RunningMoments()
        self._health = HealthMonitor(self._settings)
        self._shuffling = torch.Generator().manual_seed(self.config.seed)
        self._last_stats: Stats = {}
        self._reporter = Reporter(
            self._settings,
            callbacks=[],
            model=model,
            tokenizer=tokenizer,
            optimizer=self._train_state.optimizer,
            scheduler=self._train_state.scheduler,
            num_updates=self.config.total_ppo_epochs,
            is_main=self.engine.is_main,
        )
        self._reporter.begin()
        self.dataloader = None
        if dataset is not None:
            self.dataloader = self.prepare_dataloader(dataset, data_collator)

    @property
    def accelerator(self) -> Any:
        """What accelerate knows of the processes: device, process_index, is_main_process, ..."""
        return self.engine.accelerator

    @property
    def current_device(self) -> torch.device:
        """Where this process computes."""
        return self.engine.device

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What moves policy and value head."""
        return self._train_state.optimizer

    def prepare_dataloader(
        self, dataset: Any, data_collator: Collator | None = None
    ) -> DataLoader[Any]:
        """Whole batches of `batch_size` rows, each process its own, in a new order in each pass.

        Raises:
            DataError: the data set is too small for one batch.
        """
        if self.config.remove_unused_columns:
            dataset = without_unused_columns(dataset)
        return shuffled_batches(
            dataset,
            data_collator,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            rank=self.engine.rank,
            num_processes=self.engine.num_processes,
        )

    def generate(
        self,
        query_tensor: Tensor | Sequence[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample responses by transformers' `generate`, from the policy as `step` trains it.

        A query (P,) gives (1, L), as `generate` ends it. A list of them gives a list of (L,),
        `batch_size` sampled together, each up to and with its first end-of-sequence token.
        `generate_ref_response` gives a second result of the same form, by the reference.
        `length_sampler` draws the most new tokens of each batch.

        Raises:
            ConfigError: arguments would sample from another distribution than the policy.
            DataError: a query is no vector of token ids.
        """
        single = isinstance(query_tensor, Tensor)
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        check_vectors("query", queries)
        arguments = unrestricted(generation_kwargs, self.config.temperature)
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        given_pad = arguments.pop("pad_token_id", None)
        given_ends = arguments.setdefault("eos_token_id", eos)
        ends = set(given_ends if isinstance(given_ends, list) else [given_ends])
        if not single:
            ends.add(eos)
        results = []
        for model in (self.policy, self.reference)[: 1 + generate_ref_response]:
            with self._whole(), model.within():
                responses = generate_responses(
                    model.model,
                    queries,
                    ends=ends - {None},
                    pad_token_id=next((i for i in (given_pad, pad, eos) if i is not None), 0),
                    batch_size=batch_size,
                    return_prompt=return_prompt,
                    length_sampler=length_sampler,
                    arguments=arguments,
                )
            results.append(responses[0][None] if single else responses)
        return tuple(results) if generate_ref_response else results[0]

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Sequence[Tensor | float],
        response_masks: Masks = None,
    ) -> Stats:
        """One PPO step on `batch_size` queries (P,), responses (T,) and their scores.

        A mask (T,) of a response is 0 or False for tokens that the policy did not choose, such
        as a tool's output. Returns the statistics, by the names of the classic loop.

        Raises:
            DataError: the batch has not `batch_size` rows, or a row cannot be used.
            TrainingError: too many optimizer steps in a row were skipped.
        """
        started = time.monotonic()
        given = check_scores(scores, self.config.batch_size)
        with self._whole():
            rollout = self._rollout(queries, responses, response_masks)
            judged = self._judge(rollout, given.to(self.engine.device))
        rollout, judged = self._everywhere(rollout), self._everywhere(judged)
        shaped = shaped_scores(judged.scores, rollout, self._settings, self._moments)
        judged = replace(judged, scores=shaped)
        scored = time.monotonic()
        kl_coef = self._adaptive_kl.kl_coef if self._adaptive_kl else self._settings.kl_coef
        kl = divergence(rollout, judged, self._settings.kl_estimator)
        experience = make_experience(rollout, judged, kl, self._settings, kl_coef=kl_coef)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        sums = self._learn(experience)
        stats = step_stats(
            experience,
            judged,
            kl,
            sums,
            kl_coef=kl_coef,
            vf_coef=self._settings.vf_coef,
        )
        stats["ppo/learning_rate"] = learning_rate
        stats["ppo/skipped_steps"] = float(self._train_state.skipped_steps)
        stats["time/ppo/forward_pass"] = scored - started
        stats["time/ppo/total"] = time.monotonic() - started
        self._follow(stats)
        return stats

    def log_stats(
        self,
        stats: Stats,
        batch: Mapping[str, Sequence[Any]],
        rewards: Sequence[Tensor | float],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Send statistics, and the rewards of all processes, to `log_with`, if that is set.

        Queries and responses go there as a table, if the batch has their texts, and with them
        what else `columns_to_log` names.

        Raises:
            DataError: the batch has no such further column.
        """
        if self.config.log_with is None:
            return
        values = [float(reward) for reward in rewards]
        everywhere = torch.tensor(self.engine.gather_objects(values))
        self._reporter.state.global_step += 1
        self._reporter.log(
            numbers(stats)
            | {
                "env/reward_mean": everywhere.mean().item(),
                "env/reward_std": everywhere.std(correction=0).item(),
            }
        )
        table = texts_table(batch, values, columns_to_log, self.engine.gather_objects)
        if self.engine.is_main and table is not None:
            log_table(
                table,
                step=self._reporter.state.global_step,
                callbacks=self._reporter.callbacks,
                output_dir=self.config.output_dir,
            )

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write policy, value head, tokenizer and model card; all processes call it."""
        weights = self.engine.full_state_dict(self.model)
        if self.engine.is_main:
            self.model.save_pretrained(save_directory, state_dict=weights)
            self.tokenizer.save_pretrained(save_directory)
            self.create_model_card(save_directory)

    def create_model_card(self, path: str | Path, model_name: str | None = None) -> None:
        """Write README.md into a folder, with the settings and the last step's statistics."""
        write_model_card(
            path,
            config=self._settings,
            base_model=getattr(self.model.config, "_name_or_path", None) or None,
            metrics=numbers(self._last_stats),
            model_name=model_name,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "PPO",
        token: str | None = None,
        private: bool | None = None,
    ) -> str | None:
        """Upload what `save_pretrained` writes; the address of the commit, in the main process.

        Raises:
            ConfigError: `repo_id` cannot be the name of a repository.
            TrainingError: the hub cannot be reached, or refuses.
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            if not self.engine.is_main:
                return None
            self.create_model_card(folder, model_name=repo_id)
            return push_folder(
                folder,
                repo_id=repo_id,
                token=token,
                private=private,
                commit_message=commit_message,
            )

    # --- The phases of a step ---

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Inside, the policy is whole in every process, and computes in training's precision."""
        with self.engine.gathered(self._train_state.module), self.engine.autocast():
            yield

    def _rollout(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], masks: Masks
    ) -> Rollout:
        """The script's rows as a rollout, with the policy's log-probabilities."""
        config: Any = self.model.config
        rollout = make_rollout(
            queries,
            responses,
            masks,
            batch_size=self.config.batch_size,
            start_token_id=config.decoder_start_token_id if config.is_encoder_decoder else None,
            eos_token_id=self.tokenizer.eos_token_id,
            temperature=self.config.temperature,
            device=self.engine.device,
        )
        # Under the policy as it is now: whatever generated them rounds in another way (TRL #2358).
        rollout.logprobs.copy_(
            reference_logprobs(self.policy, rollout, self.config.mini_batch_size)
        )
        return rollout

    def _judge(self, rollout: Rollout, given: Tensor) -> Scores:
        if self.engine.any(not bool(given.isfinite().all())):
            raise DataError(f"Scores must be finite numbers; here they are {given.tolist()}.")
        size, exact = self.config.mini_batch_size, self._settings.kl_estimator == "full"
        return Scores(
            scores=given,
            ref_logprobs=reference_logprobs(self.reference, rollout, size),
            values=critic_values(self.critic, rollout, size),
            full_kl=full_kl(self.policy, self.reference, rollout, size) if exact else None,
        )

    def _everywhere(self, record: Record) -> Record:
        """The rows of all processes, in every process."""
        rows = self.config.batch_size * self.engine.num_processes
        return map_tensors(record, partial(self.engine.gather_rows, rows=rows))

    def _learn(self, experience: Experience) -> TokenSums:
        """Move policy and value head; the sums of all processes.

        Raises:
            TrainingError: too many optimizer steps in a row were skipped.
        """
        train_state = self._train_state
        # transformers recomputes activations in training mode alone; dropout is off anyway.
        train_state.module.train(self.config.gradient_checkpointing)
        progress = UpdateProgress.at_start(self._settings, len(experience.rollout), self._shuffling)
        update_policy(train_state, experience, self._settings, self.engine, progress)
        train_state.module.eval()
        self._health.check_skipped(train_state.skipped_in_a_row)
        return progress.sums

    def _follow(self, stats: Stats) -> None:
        """What follows a step: coefficient, learning rate, warnings."""
        if self._adaptive_kl is not None:
            everywhere = self.config.batch_size * self.engine.num_processes
            self._adaptive_kl.update(stats["objective/kl"], everywhere)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._last_stats = stats
        if self.engine.is_main:
            for warning in self._health.check(guarded(stats)):
                logger.warning("%s", warning)

    def _make_train_state(self, optimizer: torch.optim.Optimizer | None) -> TrainState:
        module = ActorCritic(self.policy, self.critic)
        if optimizer is None:
            trained = [p for p in module.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(trained, lr=self.config.learning_rate)
        check_optimizer(optimizer, module)
        check_sharding(self._settings, self.engine, module)
        prepared, optimizer = self.engine.prepare(module, optimizer)
        # Leaves the learning rate alone: the script's own schedule counts calls of step().
        steady = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 1.0)
        return TrainState(module=prepared, optimizer=optimizer, scheduler=steady)


def _check_arguments(
    config: PPOConfig,
    ref_model: nn.Module | None,
    num_shared_layers: int | None,
    training_data_collator: object,
) -> None:
    if not isinstance(config, PPOConfig):
        raise ConfigError(
            f"config is a {type(config).__module__}.{type(config).__name__}; the classic loop "
            "takes ppo_core.classic.PPOConfig."
        )
    if ref_model is not None and num_shared_layers is not None:
        raise ConfigError(
            f"num_shared_layers={num_shared_layers} has no effect on the ref_model that is handed "
            "over. Leave out one of them."
        )
    if training_data_collator is not None:
        raise ConfigError(
            "training_data_collator is not honoured: step() pads the rows that it gets itself. "
            "Leave it out; data_collator makes the batches of the data set."
        )
