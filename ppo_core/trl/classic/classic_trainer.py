"""The trainer of the classic loop, with the methods and arguments of TRL 0.11."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from ppo_core.data.prompt_set import Collator
from ppo_core.distributed.choose_engine import choose_engine
from ppo_core.errors import ConfigError, ModelError
from ppo_core.io.random_state import seed_global_generators
from ppo_core.models.model_with_value_head import ModelWithValueHead
from ppo_core.models.reference import create_reference_model
from ppo_core.ppo.rewards import RewardMix
from ppo_core.reporting.callbacks import Reporter
from ppo_core.reporting.sample_table import log_table
from ppo_core.training.model_card import push_folder, write_model_card
from ppo_core.training.model_setup import make_models
from ppo_core.training.script_models import ScriptModels
from ppo_core.trl.classic.classic_config import ClassicPPOConfig
from ppo_core.trl.classic.classic_step import ClassicStep, StepInputs
from ppo_core.trl.classic.dataloader import shuffled_batches, without_unused_columns
from ppo_core.trl.classic.generation import Generation, generate_responses
from ppo_core.trl.classic.step_inputs import Masks, as_numbers, check_vectors
from ppo_core.trl.classic.step_stats import Stats, numbers, texts_table
from ppo_core.trl.script_settings import protect_copy

logger = logging.getLogger(__name__)


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
        """Prepare `model` for training in place; seed Python, NumPy and torch with `config.seed`.

        Args:
            config: the settings; None uses the defaults.
            model: a model with a value head, causal or sequence-to-sequence; required.
            ref_model: the reference; None uses a copy of the policy, or the policy without its
                adapter.
            tokenizer: the policy's tokenizer; required.
            dataset: the rows of `dataloader`; None if the script has its own loader.
            optimizer: the optimizer; None uses Adam.
            data_collator: makes a batch from a list of rows; None makes a list for each column.
            num_shared_layers: number of frozen layers that the policy shares with the reference;
                ignored with a warning if there is a ref_model.
            lr_scheduler: advanced after each `step`; None keeps the learning rate constant.
            training_data_collator: must be None, because `step` pads its own rows.

        Raises:
            ConfigError: arguments contradict each other, or an argument is not supported.
            ModelError: a model has the wrong type or cannot be trained.
        """
        config = config or ClassicPPOConfig()
        _check_arguments(config, training_data_collator)
        self.config = protect_copy(replace(config), config)
        self.model, self.tokenizer = _require_model(model, tokenizer)
        seed_global_generators(self.config.seed)
        self.model.eval()
        self.engine = choose_engine()
        self._settings = self.config.update_settings()
        if num_shared_layers is not None:
            ref_model = self._share_layers(ref_model, num_shared_layers)
        self._step = self._make_step(ref_model, optimizer)
        is_copied = ref_model is None and not self.model.is_peft_model
        self.ref_model = self.reference.model if is_copied else ref_model
        self.lr_scheduler = lr_scheduler
        self._last_stats: Stats = {}
        self._warned: set[str] = set()
        self._reporter = self._make_reporter()
        self._reporter.begin()
        self.dataloader = None
        if dataset is not None:
            self.dataloader = self.prepare_dataloader(dataset, data_collator)
        else:
            warnings.warn(
                "There is no dataset, so the trainer has no dataloader: pass batches of "
                f"batch_size={self.config.batch_size} responses to step().",
                stacklevel=2,
            )

    def _share_layers(self, ref_model: nn.Module | None, num_shared_layers: int) -> nn.Module:
        """Return the given reference, or a new one that shares the model's first layers."""
        if ref_model is None:
            return create_reference_model(self.model, num_shared_layers=num_shared_layers)
        warnings.warn(
            f"{num_shared_layers=} has no effect, because you passed a ref_model.", stacklevel=3
        )
        return ref_model

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
        """Accelerator object of accelerate, with device, process_index, is_main_process, ..."""
        return self.engine.accelerator

    @property
    def current_device(self) -> torch.device:
        """Device of this process."""
        return self.engine.device

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of policy and value head."""
        return self._step.train_state.optimizer

    def prepare_dataloader(
        self, dataset: Any, data_collator: Collator | None = None
    ) -> DataLoader[Any]:
        """Return a loader of full batches from this process's rows, shuffled anew in each pass.

        A pass raises a DataError if the data set is too small for one batch.
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
        """Sample responses from the policy with transformers' `generate`.

        For a single query (P,), return the response as a tensor (1, L). For a list of queries,
        sample in batches of `batch_size` and return a list of tensors (L,). Each tensor is cut
        after the first end-of-sequence token of the response. With `return_prompt`, each response
        begins with its query, except for an encoder-decoder model. With `generate_ref_response`,
        return a pair: the responses of the policy and of the reference. `length_sampler` draws
        max_new_tokens for each batch. The next calls of `step` account for `temperature`, `top_k`
        and `top_p`; other arguments that change the distribution cause a warning.

        Raises:
            ConfigError: an argument requests a dict, or several responses to a query, or the
                temperature is not above 0.
            DataError: a query is not a non-empty vector of token ids.
        """
        single = isinstance(query_tensor, Tensor)
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        check_vectors("query", queries)
        generation = Generation.of(generation_kwargs, self.config.temperature)
        self._step.sampled = generation.settings
        self._warn_once(generation.warning(self._settings.kl_estimator))
        arguments = generation.arguments
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

    def _warn_once(self, warning: str | None) -> None:
        if warning is not None and warning not in self._warned and self.engine.is_main:
            self._warned.add(warning)
            logger.warning(warning)

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Sequence[Tensor | float],
        response_masks: Masks = None,
    ) -> Stats:
        """Take one PPO step on `batch_size` queries (P,), responses (T,) and scores.

        A response mask (T,) is 0 or False for tokens that the policy did not sample, such as
        the output of a tool. Return the statistics under the names of TRL 0.11.

        Raises:
            DataError: the number of rows is not `batch_size`, a row is invalid, or a score is not
                finite.
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
        """Send statistics, and mean and deviation of all rewards, to the tracker `log_with`.

        Do nothing if `log_with` is None. If the batch has the columns "query" and "response", also
        log a table of these texts, the rewards, and the columns in `columns_to_log`.

        Raises:
            DataError: the batch lacks a column of `columns_to_log`.
        """
        if self.config.log_with is None:
            return
        values = as_numbers(rewards)
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
        """Write policy, value head, tokenizer and model card; call this in every process."""
        weights = self.engine.full_state_dict(self.model)
        if weights is not None:
            self.model.save_pretrained(save_directory, state_dict=weights)
            self.tokenizer.save_pretrained(save_directory)
            self.create_model_card(save_directory)

    def create_model_card(self, path: str | Path, model_name: str | None = None) -> None:
        """Write a README.md with the settings and the last step's statistics into a folder."""
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
        """Upload the files of `save_pretrained` to the hub; call this in every process.

        The main process uploads and returns the URL of the commit; other processes return None.

        Raises:
            ConfigError: `repo_id` is not a valid repository name.
            TrainingError: the hub cannot be reached, or rejects the upload.
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


def _check_arguments(config: ClassicPPOConfig, training_data_collator: object) -> None:
    if not isinstance(config, ClassicPPOConfig):
        raise ConfigError(
            f"config is a {type(config).__module__}.{type(config).__name__}, but the classic loop "
            "takes ppo_core.classic.PPOConfig."
        )
    if training_data_collator is not None:
        raise ConfigError(
            "training_data_collator is not supported, because step() pads its own rows. Leave "
            "training_data_collator out; data_collator makes the batches of the data set."
        )


def _require_model(
    model: object, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[ModelWithValueHead, PreTrainedTokenizerBase]:
    if not isinstance(model, ModelWithValueHead) or tokenizer is None:
        raise ModelError(
            f"model is a {type(model).__name__} and tokenizer a {type(tokenizer).__name__}. "
            "As model, pass AutoModelForCausalLMWithValueHead.from_pretrained(path), or the "
            "Seq2Seq class. As tokenizer, pass the policy's tokenizer."
        )
    return model, tokenizer
