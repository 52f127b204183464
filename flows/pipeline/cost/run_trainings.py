"""The trainings of a run: the rows and steps of each, and its cost before the run starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import mean

import pyarrow.compute
import torch

from pipeline.cost.estimated_cost import TrainingCost
from pipeline.cost.memory.ppo_memory import PPOSize
from pipeline.cost.memory.supervised_memory import SupervisedSize
from pipeline.cost.memory_table import RANK, Training, TrainingSize
from pipeline.cost.run_time import Speed, ppo_seconds, supervised_seconds
from pipeline.cost.training_sizes import (
    Processes,
    adapter_parameters,
    ppo_size,
    reward_size,
    sft_size,
)
from pipeline.inputs.run_data import RunData
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import SupervisedSection
from ppo_core.data.rows.read_rows import Rows
from ppo_core.ppo.schedule import Schedule, make_schedule
from ppo_core.supervised.examples.sft_examples import IGNORED_LABEL
from ppo_core.supervised.step_order import StepOrder, passes_of_step
from ppo_core.supervised.supervised_config import SupervisedConfig

SOME_STEPS = 32
"""Number of optimizer steps whose passes are counted, to estimate the time of all steps."""


@dataclass(frozen=True, kw_only=True)
class SupervisedRows:
    """Rows and steps of a supervised training."""

    rows: int
    """Number of examples or pairs."""

    tokens: int
    """Number of tokens in one pass over the rows."""

    counted: int
    """Number of tokens with a loss of the LM head in one pass over the rows; 0 for pairs."""

    longest: int
    """Number of tokens of the longest text."""

    epochs: int
    """Number of passes over the rows."""

    optimizer_steps: int
    """Number of optimizer steps of the training."""

    some_steps: Sequence[Sequence[int]]
    """Tokens of each row in up to `SOME_STEPS` optimizer steps."""

    def passes(self, batch_size: int, size: SupervisedSize) -> float:
        """Return the mean number of forward-backward passes of a process in an optimizer step."""
        device = torch.device("cpu" if size.on_cpu else "cuda")
        return mean(
            len(passes_of_step(tokens, batch_size, device=device, processes=size.processes))
            for tokens in self.some_steps
        )


def sft_rows(data: RunData) -> SupervisedRows | None:
    """Return the rows of the fine-tuning; None if the policy is not fine-tuned."""
    if not data.settings.sft_data:
        return None
    rows = data.encoded_demonstrations()
    labels = pyarrow.compute.list_flatten(rows.table.with_format("arrow")["labels"])
    counted = pyarrow.compute.sum(pyarrow.compute.not_equal(labels, IGNORED_LABEL)).as_py()
    return _supervised(rows, _tokens(rows, "input_ids"), data.settings.sft, counted=counted)


def pair_rows(data: RunData) -> SupervisedRows | None:
    """Return the rows that train the reward model; None if the settings name a reward model."""
    if data.settings.reward_model:
        return None
    pairs = data.encoded("pairs", data.reward_training_pairs(), data.settings.reward_model_training)
    return _pairs(pairs, data.settings)


def judge_rows(data: RunData) -> SupervisedRows | None:
    """Return the rows that train the judge; None if the settings name a judge."""
    return None if data.settings.judge else _pairs(data.encoded_judge_pairs(), data.settings)


def training_costs(
    settings: Settings,
    processes: Processes,
    lengths: Sequence[int],
    *,
    sft: SupervisedRows | None,
    pairs: SupervisedRows | None,
    judge: SupervisedRows | None,
) -> list[TrainingCost]:
    """Return the cost of each training of a run, or [] if one of them cannot be computed.

    `lengths` are the numbers of tokens of the prompts for PPO.
    """
    members = settings.reward_model_training.members
    costs = [
        *([_sft_cost(settings, sft, processes)] if sft else []),
        *([_reward_cost(settings, pairs, processes, members=members)] if pairs else []),
        *([_reward_cost(settings, judge, processes, what="judge")] if judge else []),
        _ppo_cost(settings, lengths, processes),
    ]
    return [] if None in costs else [cost for cost in costs if cost is not None]


def _sft_cost(
    settings: Settings, rows: SupervisedRows, processes: Processes
) -> TrainingCost | None:
    def size_on(some: Processes) -> TrainingSize | None:
        return sft_size(settings, longest=rows.longest, processes=some)

    return _supervised_cost("SFT", "sft", settings.sft, rows, size_on, settings, processes)


def _reward_cost(
    settings: Settings,
    rows: SupervisedRows,
    processes: Processes,
    *,
    what: str = "reward model",
    members: int = 1,
) -> TrainingCost | None:
    """Return the cost of training `members` models, one after the other, on the same rows."""

    def size_on(some: Processes) -> TrainingSize | None:
        return reward_size(settings, longest=rows.longest, processes=some)

    name, config = "reward_model_training", settings.reward_model_training
    one = _supervised_cost(what, name, config, rows, size_on, settings, processes)
    if one is None or members == 1:
        return one
    return replace(one, seconds=lambda size, speed: members * one.seconds(size, speed))


def _supervised_cost(
    name: str,
    section: str,
    config: SupervisedSection,
    rows: SupervisedRows,
    size_on: Callable[[Processes], TrainingSize | None],
    settings: Settings,
    processes: Processes,
) -> TrainingCost | None:
    size = size_on(processes)
    if size is None:
        return None

    def seconds(size: TrainingSize, speed: Speed) -> float:
        assert isinstance(size, SupervisedSize)
        return supervised_seconds(
            size,
            speed,
            tokens=rows.tokens * rows.epochs,
            counted=rows.counted * rows.epochs,
            optimizer_steps=rows.optimizer_steps,
            passes=rows.passes(config.batch_size, size),
        )

    adapter = size.adapter or adapter_parameters(settings, config.lora.r or RANK)
    training = Training(name=name, section=section, size=size, adapter=adapter)
    return TrainingCost(training=training, size_on=size_on, seconds=seconds)


def _ppo_cost(
    settings: Settings, lengths: Sequence[int], processes: Processes
) -> TrainingCost | None:
    ppo = settings.ppo

    def schedule_of(number: int) -> Schedule:
        return make_schedule(ppo, num_prompts=len(lengths), num_processes=number)

    def size_on(some: Processes) -> TrainingSize | None:
        schedule = schedule_of(some.number)
        return ppo_size(settings, schedule, longest_prompt=max(lengths), processes=some)

    size = size_on(processes)
    if size is None:
        return None

    def seconds(size: TrainingSize, speed: Speed) -> float:
        assert isinstance(size, PPOSize)
        return ppo_seconds(
            size,
            schedule_of(size.processes),
            speed,
            epochs=ppo.num_ppo_epochs,
            mean_prompt=sum(lengths) / len(lengths),
            samples_here=not ppo.use_vllm,
        )

    adapter = size.adapter or adapter_parameters(settings, RANK)
    training = Training(name="PPO", section="ppo", size=size, adapter=adapter)
    return TrainingCost(training=training, size_on=size_on, seconds=seconds)


def _pairs(rows: Rows, settings: Settings) -> SupervisedRows:
    tokens = _tokens(rows, "chosen") + _tokens(rows, "rejected")
    return _supervised(rows, tokens, settings.reward_model_training, counted=0, texts=2)


def _supervised(
    rows: Rows, tokens: int, config: SupervisedConfig, *, counted: int, texts: int = 1
) -> SupervisedRows:
    lengths = rows.table["length"][:]
    order = StepOrder.of(lengths, config)
    steps = order.epoch(0)
    return SupervisedRows(
        rows=len(rows),
        tokens=tokens,
        counted=counted,
        longest=max(lengths),
        epochs=config.num_epochs,
        optimizer_steps=order.steps,
        some_steps=[
            [texts * lengths[row] for row in step]
            for step in steps[:: ceil(len(steps) / SOME_STEPS)]
        ],
    )


def _tokens(rows: Rows, column: str) -> int:
    """Return the number of token ids in a column."""
    lengths = pyarrow.compute.list_value_length(rows.table.with_format("arrow")[column])
    return int(pyarrow.compute.sum(lengths).as_py())
