"""The classic loop: the script samples and scores, the trainer takes one PPO step.

    for batch in trainer.dataloader:
        responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=32)
        scores = [reward(text) for text in tokenizer.batch_decode(responses)]
        stats = trainer.step(batch["input_ids"], responses, scores)
        trainer.log_stats(stats, batch, scores)

The names are those of TRL's PPO up to 0.11; the mathematics is that of `ppo_core.trainer`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import PreTrainedTokenizerBase, set_seed

from ppo_core.classic_config import PPOConfig
from ppo_core.classic_generation import generate_batch, unrestricted
from ppo_core.classic_sampling import LengthSampler, respond_to_batch
from ppo_core.classic_stats import Stats, step_stats
from ppo_core.completions import Completions, log_table
from ppo_core.engine import Engine
from ppo_core.errors import DataError, ModelError
from ppo_core.experience import divergence, make_experience, shaped_scores
from ppo_core.health import HealthMonitor
from ppo_core.models import ActorCritic
from ppo_core.moments import RunningMoments
from ppo_core.parts import check_optimizer, make_parts
from ppo_core.records import Rollout, Scores
from ppo_core.reference import create_reference_model
from ppo_core.reporting import Reporter
from ppo_core.reward_sources import RewardMix
from ppo_core.run_state import make_adaptive_kl
from ppo_core.scoring import critic_values, full_kl, reference_logprobs
from ppo_core.tensors import length_mask, pad_rows
from ppo_core.update import Trainee, update_policy
from ppo_core.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ModelWithValueHead,
)

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "create_reference_model",
    "respond_to_batch",
    "set_seed",
]

DATA_COLUMNS = {"input_ids", "attention_mask", "label", "query", "response"}
"""What `prepare_dataloader` keeps of a data set."""


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
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
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

        Raises:
            ModelError: a model cannot play its part.
        """
        self.config = config or PPOConfig()
        if not isinstance(model, ModelWithValueHead) or tokenizer is None:
            raise ModelError(
                f"model is a {type(model).__name__} and tokenizer a {type(tokenizer).__name__}; "
                "hand over AutoModelForCausalLMWithValueHead.from_pretrained(path), or its "
                "Seq2Seq sibling, and the policy's tokenizer."
            )
        set_seed(self.config.seed)
        self.model = model
        self.tokenizer = tokenizer
        self.engine = Engine()
        self._settings = self.config.of_update()
        if ref_model is None and num_shared_layers is not None:
            ref_model = create_reference_model(model, num_shared_layers=num_shared_layers)
        parts = make_parts(
            self._settings,
            tokenizer,
            model,
            ref_model,
            RewardMix({}, None),
            None,
            None,
            self.engine,
        )
        self.policy, self.reference, self.critic = parts.policy, parts.reference, parts.critic
        self.ref_model = ref_model or self.reference.model
        if self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self._lr_scheduler = lr_scheduler
        self._trainee = self._make_trainee(optimizer)
        self._adaptive_kl = make_adaptive_kl(
            self._settings, self.config.batch_size * self.engine.num_processes
        )
        self._moments = RunningMoments()
        self._health = HealthMonitor(self._settings)
        self._shuffling = torch.Generator().manual_seed(self.config.seed)
        self._reporter = Reporter(
            self._settings,
            callbacks=[],
            model=model,
            tokenizer=tokenizer,
            optimizer=self._trainee.optimizer,
            scheduler=self._trainee.scheduler,
            num_updates=max(1, self.config.steps // self.config.batch_size),
            is_main=self.engine.is_main,
        )
        self._reporter.begin()
        self.dataloader = None
        if dataset is not None:
            self.dataloader = self.prepare_dataloader(dataset, data_collator)

    @property
    def current_device(self) -> torch.device:
        """Where this process computes."""
        return self.engine.device

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What moves policy and value head."""
        return self._trainee.optimizer

    def prepare_dataloader(
        self, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None
    ) -> DataLoader[Any]:
        """Shuffled batches of `batch_size` rows, each process its own; a last short one is left out.

        Every step needs a whole batch; the order is new in each pass, so no row is always left
        out.
        """
        if self.config.remove_unused_columns and hasattr(dataset, "column_names"):
            unused = [name for name in dataset.column_names if name not in DATA_COLUMNS]
            dataset = dataset.remove_columns(unused)
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset,
            num_replicas=self.engine.num_processes,
            rank=self.engine.rank,
            seed=self.config.seed,
        )
        return _NewOrderEachPass(
            dataset,
            batch_size=self.config.batch_size,
            sampler=sampler,
            collate_fn=data_collator or _columns,
            drop_last=True,
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

        A query (P,) gives (1, L); a list of them a list of (L,), `batch_size` sampled together.
        A response ends with its end-of-sequence token. `generate_ref_response` gives a second
        result of the same form, by the reference. `length_sampler` draws the most new tokens
        of each batch.

        Raises:
            ConfigError: arguments would sample from another distribution than the policy.
            DataError: a query is no vector of token ids.
        """
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        for number, query in enumerate(queries):
            _check_vector("query", number, query)
        arguments = unrestricted(generation_kwargs, self.config.temperature)
        eos = arguments.setdefault("eos_token_id", self.tokenizer.eos_token_id)
        pad = arguments.pop("pad_token_id", self.tokenizer.pad_token_id)
        results = []
        for model in (self.policy, self.reference)[: 1 + generate_ref_response]:
            with model.within():
                responses = generate_batch(
                    model.model,
                    queries,
                    eos_token_id=eos if isinstance(eos, int) else None,
                    pad_token_id=0 if pad is None else pad,
                    batch_size=batch_size,
                    return_prompt=return_prompt,
                    length_sampler=length_sampler,
                    arguments=arguments,
                )
            single = isinstance(query_tensor, Tensor)
            results.append(responses[0][None] if single else responses)
        return tuple(results) if generate_ref_response else results[0]

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Sequence[Tensor | float],
        response_masks: Sequence[Tensor] | None = None,
    ) -> Stats:
        """One PPO step on `batch_size` queries (P,), responses (T,) and their scores.

        A mask (T,) of a response is 0 or False for tokens that the policy did not choose, such
        as a tool's output. Returns the statistics, by the names of the classic loop.

        Raises:
            DataError: the batch has not `batch_size` rows, or a row cannot be used.
            TrainingError: too many optimizer steps in a row were skipped.
        """
        started = time.monotonic()
        rollout = self._rollout(queries, responses, response_masks)
        judged = self._judge(rollout, scores)
        kl_coef = self._adaptive_kl.kl_coef if self._adaptive_kl else self._settings.kl_coef
        kl = divergence(rollout, judged, self._settings.kl_estimator)
        experience = make_experience(
            rollout,
            judged,
            kl,
            self._settings,
            kl_coef=kl_coef,
            sum_over_processes=self.engine.sum,
        )
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self._trainee.module.train(self.config.gradient_checkpointing)
        sums = update_policy(
            self._trainee, experience, self._settings, self.engine, self._shuffling
        )
        self._trainee.module.eval()
        self._health.check_skipped(self._trainee.skipped_in_a_row)
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()
        stats = step_stats(
            experience,
            judged,
            kl,
            sums.summed(self.engine.sum, self.engine.device),
            kl_coef=kl_coef,
            vf_coef=self._settings.vf_coef,
            sum_over_processes=self.engine.sum,
        )
        if self._adaptive_kl is not None:
            everywhere = len(queries) * self.engine.num_processes
            self._adaptive_kl.update(stats["objective/kl"], everywhere)
        stats["ppo/learning_rate"] = learning_rate
        stats["time/ppo/total"] = time.monotonic() - started
        return stats

    def log_stats(
        self,
        stats: Stats,
        batch: Mapping[str, Any],
        rewards: Sequence[Tensor | float],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Send statistics, and the rewards of a batch, to `log_with`; texts as a table.

        The table needs the texts of two columns, the query's and the response's.
        """
        values = torch.tensor([float(reward) for reward in rewards])
        logged = {name: value for name, value in stats.items() if isinstance(value, float)}
        logged["env/reward_mean"] = values.mean().item()
        logged["env/reward_std"] = values.std(correction=0).item()
        self._reporter.state.global_step += 1
        self._reporter.log(logged)
        texts = [list(batch[name]) for name in columns_to_log if name in batch]
        if self.engine.is_main and len(texts) == 2:
            log_table(
                Completions(texts[0], texts[1], values.tolist()),
                step=self._reporter.state.global_step,
                callbacks=self._reporter.callbacks,
                output_dir=self.config.output_dir,
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write policy, value head and tokenizer."""
        if self.engine.is_main:
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def push_to_hub(self, repo_id: str, **arguments: Any) -> None:
        """Upload policy, value head and tokenizer."""
        if self.engine.is_main:
            self.model.push_to_hub(repo_id, **arguments)
            self.tokenizer.push_to_hub(repo_id, **arguments)

    # --- The phases of a step ---

    def _rollout(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        response_masks: Sequence[Tensor] | None,
    ) -> Rollout:
        """The script's rows as a rollout, with the policy's log-probabilities."""
        responses = [self._without_start(response) for response in responses]
        self._check_rows(queries, responses, response_masks)
        prompt_ids, prompt_lengths = pad_rows([query.tolist() for query in queries])
        response_ids, lengths = pad_rows([response.tolist() for response in responses])
        mask = length_mask(lengths, response_ids.shape[1])
        if response_masks is not None:
            counted, _ = pad_rows([row.long().tolist() for row in response_masks])
            mask = mask & counted.bool()
        ends = [response[-1].item() == self.tokenizer.eos_token_id for response in responses]
        device = self.engine.device
        rollout = Rollout(
            prompt_ids=prompt_ids.to(device),
            prompt_lengths=prompt_lengths.to(device),
            response_ids=response_ids.to(device),
            response_lengths=lengths.to(device),
            response_mask=mask.to(device),
            has_stop=torch.tensor(ends, device=device),
            logprobs=torch.zeros(response_ids.shape, device=device),
            temperature=self.config.temperature,
        )
        # Under the policy as it is now: whatever generated them rounds in another way (TRL #2358).
        rollout.logprobs.copy_(
            reference_logprobs(self.policy, rollout, self.config.mini_batch_size)
        )
        return rollout

    def _judge(self, rollout: Rollout, scores: Sequence[Tensor | float]) -> Scores:
        given = torch.tensor([float(score) for score in scores], device=self.engine.device)
        if self.engine.any(not bool(given.isfinite().all())):
            raise DataError(f"Scores must be finite numbers; they are {given.tolist()}.")
        size, exact = self.config.mini_batch_size, self._settings.kl_estimator == "full"
        return Scores(
            scores=shaped_scores(given, rollout, self._settings, self._moments, self.engine.sum),
            ref_logprobs=reference_logprobs(self.reference, rollout, size),
            values=critic_values(self.critic, rollout, size),
            full_kl=full_kl(self.policy, self.reference, rollout, size) if exact else None,
        )

    def _without_start(self, response: Tensor) -> Tensor:
        """A decoder's start token is what `generate` begins with, not what the policy chose."""
        config: Any = self.model.config
        starts = config.is_encoder_decoder and len(response) > 0
        if starts and response[0] == config.decoder_start_token_id:
            return response[1:]
        return response

    def _check_rows(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        response_masks: Sequence[Tensor] | None,
    ) -> None:
        size = self.config.batch_size
        for name, rows in (("query", queries), ("response", responses)):
            if len(rows) != size:
                raise DataError(
                    f"step() got {len(rows)} rows of {name}, and batch_size is {size}. Hand over "
                    "whole batches, or set batch_size."
                )
            for number, row in enumerate(rows):
                _check_vector(name, number, row)
        for number, (response, mask) in enumerate(zip(responses, response_masks or [])):
            if len(mask) != len(response) or not mask.any():
                raise DataError(
                    f"Mask {number} counts {int(mask.sum())} of {len(mask)} tokens, for a response "
                    f"of {len(response)}: it must be as long and count at least one."
                )

    def _make_trainee(self, optimizer: torch.optim.Optimizer | None) -> Trainee:
        module = ActorCritic(self.policy, self.critic)
        if optimizer is None:
            trained = [p for p in module.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(trained, lr=self.config.learning_rate)
        check_optimizer(optimizer, module)
        prepared, optimizer = self.engine.prepare(module, optimizer)
        # The script's own schedule counts calls of step(), not optimizer steps.
        steady = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        exact = self._settings.kl_in_loss and self._settings.kl_estimator == "full"
        return Trainee(
            module=prepared,
            optimizer=optimizer,
            scheduler=steady,
            reference=self.reference if exact else None,
        )


class _NewOrderEachPass(DataLoader[Any]):
    """A loader whose sampler is told of each pass, without which all have one order."""

    def __iter__(self) -> Any:
        sampler: Any = self.sampler
        sampler.set_epoch(sampler.epoch + 1)
        return super().__iter__()


def _columns(rows: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _check_vector(name: str, number: int, row: Tensor) -> None:
    if not isinstance(row, Tensor) or row.ndim != 1 or len(row) == 0:
        shape = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
        raise DataError(
            f"{name} {number} must be a tensor (length,) of token ids, at least one; it is {shape}."
        )
