"""The trainer of the classic loop, with the methods and arguments of TRL 0.11."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, set_seed

from ppo_core.classic.classic_config import ClassicPPOConfig
from ppo_core.classic.classic_step import ClassicStep, StepInputs
from ppo_core.classic.dataloader import shuffled_batches, without_unused_columns
from ppo_core.classic.generation import generate_responses, unrestricted
from ppo_core.classic.step_inputs import Masks, check_vectors
from ppo_core.classic.step_stats import Stats, numbers, texts_table
from ppo_core.data.prompt_set import Collator
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.reference import create_reference_model
from ppo_core.models.value_head import ModelWithValueHead
from ppo_core.ppo.reward_functions import RewardMix
from ppo_core.reporting.callbacks import Reporter
from ppo_core.reporting.sample_table import log_table
from ppo_core.training.model_card import push_folder, write_model_card
from ppo_core.training.model_setup import ScriptModels, make_models


class ClassicPPOTrainer:
    """Takes PPO steps on responses that a script has sampled and scored."""

    def __init__(
        self,
        config: ClassicPPOConfig | None = None,
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
        """Set up training of the model in place; torch is seeded with `config.seed`.

        Args:
            config: the settings.
            model: a model with a value head, causal or sequence-to-sequence.
            ref_model: the reference; None copies the policy, or disables its adapter.
            tokenizer: the policy's.
            dataset: the rows of `dataloader`; None if the script has its own loader.
            optimizer: replaces Adam.
            data_collator: makes a batch of rows; None makes a list for each column.
            num_shared_layers: without a ref_model: frozen layers that policy and reference share.
            lr_scheduler: steps once after each `step`; None keeps the learning rate constant.
            training_data_collator: not honoured; `step` pads its rows itself.

        Raises:
            ConfigError: arguments contradict each other, or one is not honoured.
            ModelError: a model has the wrong type or cannot be trained.
            DataError: the data set is too small for one batch.
        """
        self.config = config or ClassicPPOConfig()
        _check_arguments(self.config, ref_model, num_shared_layers, training_data_collator)
        self.model, self.tokenizer = _require_model(model, tokenizer)
        set_seed(self.config.seed)
        self.model.eval()
        self.engine = Engine()
        self._settings = self.config.update_settings()
        if ref_model is None and num_shared_layers is not None:
            ref_model = create_reference_model(self.model, num_shared_layers=num_shared_layers)
        self._step = self._make_step(ref_model, optimizer)
        self.ref_model = ref_model or self.reference.model
        self.lr_scheduler = lr_scheduler
        self._last_stats: Stats = {}
        self._reporter = self._make_reporter()
        self._reporter.begin()
        self.dataloader = None
        if dataset is not None:
            self.dataloader = self.prepare_dataloader(dataset, data_collator)

    def _make_step(
        self, ref_model: nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> ClassicStep:
        no_rewards = RewardMix({}, None)
        given = ScriptModels(self.model, ref_model, None, no_rewards)
        models = make_models(self._settings, self.tokenizer, given, self.engine)
        self.policy, self.reference, self.critic = models.policy, models.reference, models.critic
        eos = self.tokenizer.eos_token_id
        return ClassicStep(self.config, models, self.engine, optimizer, eos_token_id=eos)

    def _make_reporter(self) -> Reporter:
        return Reporter(
            self._settings,
            callbacks=[],
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
            scheduler=self._step.train_state.scheduler,
            num_updates=self.config.total_ppo_epochs,
            is_main=self.engine.is_main,
        )

    @property
    def accelerator(self) -> Any:
        """The accelerator of accelerate: device, process_index, is_main_process, ..."""
        return self.engine.accelerator

    @property
    def current_device(self) -> torch.device:
        """The device of this process."""
        return self.engine.device

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of policy and value head."""
        return self._step.train_state.optimizer

    def prepare_dataloader(
        self, dataset: Any, data_collator: Collator | None = None
    ) -> DataLoader[Any]:
        """Return a loader of full batches of this process's rows, reshuffled in each pass.

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
        """Sample responses from the policy that `step` trains, by transformers' `generate`.

        One query (P,) returns (1, L) as `generate` ends it. A list of queries returns a list of
        (L,), sampled in batches of `batch_size`, each response up to its first end-of-sequence
        token, inclusive. `generate_ref_response` returns a pair: the policy's responses and
        the reference's. `length_sampler` draws max_new_tokens for each batch.

        Raises:
            ConfigError: an argument would sample from another distribution than the policy.
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
            with self._step.full_policy(), model.within():
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
        """Take one PPO step on `batch_size` queries (P,), responses (T,) and their scores.

        A response mask (T,) is 0 or False for tokens that the policy did not sample, such as
        the output of a tool. Returns the statistics under the names of TRL 0.11.

        Raises:
            DataError: the batch has not `batch_size` rows, or a row cannot be used.
            TrainingError: too many optimizer steps in a row were skipped.
        """
        stats = self._step.take(StepInputs(queries, responses, scores, response_masks))
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._last_stats = stats
        return stats

    def log_stats(
        self,
        stats: Stats,
        batch: Mapping[str, Sequence[Any]],
        rewards: Sequence[Tensor | float],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Send statistics and the mean reward of all processes to `log_with`, if it is set.

        If the batch has the texts "query" and "response", they are logged as a table, with the
        other columns that `columns_to_log` names.

        Raises:
            DataError: the batch lacks a column of `columns_to_log`.
        """
        if self.config.log_with is None:
            return
        values = [float(reward) for reward in rewards]
        all_rewards = torch.tensor(self.engine.gather_objects(values))
        self._reporter.state.global_step += 1
        self._reporter.log(
            numbers(stats)
            | {
                "env/reward_mean": all_rewards.mean().item(),
                "env/reward_std": all_rewards.std(correction=0).item(),
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
        """Write policy, value head, tokenizer and model card; call it in every process."""
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
        """Upload the files of `save_pretrained`; return the URL of the commit, None elsewhere.

        Only the main process uploads; call it in every process.

        Raises:
            ConfigError: `repo_id` is no valid name of a repository.
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


def _check_arguments(
    config: ClassicPPOConfig,
    ref_model: nn.Module | None,
    num_shared_layers: int | None,
    training_data_collator: object,
) -> None:
    if not isinstance(config, ClassicPPOConfig):
        raise ConfigError(
            f"config is a {type(config).__module__}.{type(config).__name__}; the classic loop "
            "takes ppo_core.classic.PPOConfig."
        )
    if ref_model is not None and num_shared_layers is not None:
        raise ConfigError(
            f"num_shared_layers={num_shared_layers} has no effect if a ref_model is passed. "
            "Leave out one of them."
        )
    if training_data_collator is not None:
        raise ConfigError(
            "training_data_collator is not honoured: step() pads its rows itself. "
            "Leave it out; data_collator makes the batches of the data set."
        )


def _require_model(
    model: object, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[ModelWithValueHead, PreTrainedTokenizerBase]:
    if not isinstance(model, ModelWithValueHead) or tokenizer is None:
        raise ModelError(
            f"model is a {type(model).__name__} and tokenizer a {type(tokenizer).__name__}; "
            "pass AutoModelForCausalLMWithValueHead.from_pretrained(path), or its "
            "Seq2Seq counterpart, and the policy's tokenizer."
        )
    return model, tokenizer
