"""Sizes of a run: rows, tokens, parameters, updates, optimizer steps, and the time of PPO."""

from dataclasses import dataclass
from math import ceil

import pyarrow.compute

from pipeline.evaluation.comparison import contests_between
from pipeline.inputs import data_sets
from pipeline.launch.commands import gpus
from pipeline.launch.ppo_memory import ppo_size
from pipeline.settings.settings import Settings
from pipeline.stages.run_time import describe_seconds, estimate_ppo_seconds
from ppo_core.data.prompts import encode_prompts
from ppo_core.data.rows.reader import Rows
from ppo_core.models.loading import count_parameters
from ppo_core.ppo.schedule import Schedule, make_schedule
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.training.memory import describe_memory, peak_memory


@dataclass(frozen=True, kw_only=True)
class SupervisedSize:
    """Size of a supervised training."""

    rows: int
    """Number of examples or pairs."""

    tokens: int
    """Number of tokens in one pass over the rows."""

    epochs: int
    """Number of passes over the rows."""

    optimizer_steps: int
    """Number of optimizer steps of the training."""


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """Size of a run of the flow."""

    policy_parameters: int
    """Number of parameters of the policy."""

    reward_parameters: int
    """Number of parameters of the reward model; of the model to train, if none is given."""

    sft: SupervisedSize | None
    """Fine-tuning of the policy; None without it."""

    reward_model: SupervisedSize | None
    """Training of the reward model; None if one is given."""

    judge: SupervisedSize | None
    """Training of the judge; None if one is named."""

    validation_pairs: int
    """Number of pairs that validate the reward model."""

    prompts: int
    """Number of prompts for PPO."""

    prompt_tokens: int
    """Number of tokens of all prompts for PPO."""

    response_length: int
    """Maximum number of tokens of a response."""

    processes: int
    """Number of PPO processes on all machines."""

    ppo: Schedule
    """Episodes, updates and optimizer steps of PPO."""

    ppo_seconds: float
    """Rough time of PPO on machines like this one, see `estimate_ppo_seconds`."""

    memory: str
    """Memory of PPO on one device, in words."""

    evaluation_prompts: int
    """Number of prompts that the policies answer."""

    contests: int
    """Number of comparisons of two policies, or of a policy with references."""


def measure_run(settings: Settings, *, has_champion: bool) -> RunSize:
    """Return the sizes of a run whose inputs were checked; no weights are loaded.

    Raises:
        ConfigError: the sizes of PPO contradict each other.
        DataError: a row cannot be used.
        ModelError: a model cannot be read.
    """
    tokenizer = data_sets.policy_tokenizer(settings)
    prompts = data_sets.training_prompts(settings).column("prompt")
    lengths = [len(ids) for ids in encode_prompts(tokenizer, prompts)]
    examples = data_sets.examples(settings)
    contestants = [
        "sft",
        "ppo",
        *(["reference"] if data_sets.references_of(examples) else []),
        *(["champion"] if has_champion else []),
    ]
    found = gpus()
    devices = found or 1
    processes = (settings.processes or devices) * settings.num_nodes
    policy = count_parameters(settings.policy)
    reward_model = count_parameters(settings.reward_model or settings.policy, scores=True)
    schedule = make_schedule(settings.ppo, num_prompts=len(prompts), num_processes=processes)
    return RunSize(
        policy_parameters=policy,
        reward_parameters=reward_model,
        sft=_sft_size(settings),
        reward_model=None
        if settings.reward_model
        else _reward_size(data_sets.encoded_pairs(settings), settings),
        judge=None
        if settings.judge
        else _reward_size(data_sets.encoded_judge_pairs(settings), settings),
        validation_pairs=len(data_sets.test_pairs(settings)),
        prompts=len(prompts),
        prompt_tokens=sum(lengths),
        response_length=settings.ppo.response_length,
        processes=processes,
        ppo=schedule,
        ppo_seconds=estimate_ppo_seconds(
            settings,
            policy=policy,
            reward_model=reward_model,
            episodes=schedule.total_episodes,
            tokens=sum(lengths) / len(lengths) + settings.ppo.response_length,
        ),
        memory=_memory(settings, schedule, max(lengths), processes, on_gpus=found > 0),
        evaluation_prompts=len(examples),
        contests=len(contests_between(contestants)),
    )


def sizes_in_words(settings: Settings, *, has_champion: bool) -> str:
    """Return the sizes of a run in lines of text; see `measure_run`."""
    return describe_run(measure_run(settings, has_champion=has_champion))


def describe_run(size: RunSize) -> str:
    """Return the sizes in lines of text."""
    reward = "trained" if size.reward_model else "given"
    questions = 2 * size.contests * size.evaluation_prompts
    ppo, tokens = size.ppo, size.ppo.total_episodes * size.response_length
    lines = [
        f"policy: parameters {size.policy_parameters:,}",
        f"reward model, {reward}: parameters {size.reward_parameters:,}",
        *([f"SFT: {_describe(size.sft)}"] if size.sft else []),
        *([f"reward model training: {_describe(size.reward_model)}"] if size.reward_model else []),
        *([f"judge training: {_describe(size.judge)}"] if size.judge else []),
        f"reward model validation: pairs {size.validation_pairs:,}",
        f"PPO: prompts {size.prompts:,}, their tokens {size.prompt_tokens:,}, "
        f"episodes {ppo.total_episodes:,}, sampled tokens at most {tokens:,}, "
        f"updates {ppo.num_updates:,}, optimizer steps {ppo.num_optimizer_steps:,}, "
        f"processes {size.processes}",
        size.memory,
        f"evaluation: prompts {size.evaluation_prompts:,}, comparisons {size.contests}, "
        f"questions to each judge about {questions:,}",
        f"time: PPO roughly {describe_seconds(size.ppo_seconds)} on machines like this one. Set "
        "another number of episodes with --total-episodes.",
    ]
    return "\n".join(lines)


def _memory(
    settings: Settings, schedule: Schedule, longest_prompt: int, processes: int, *, on_gpus: bool
) -> str:
    size = ppo_size(
        settings, schedule, longest_prompt=longest_prompt, processes=processes, on_gpus=on_gpus
    )
    if size is None:
        return "memory: not computed with offload or a file of DeepSpeed's settings."
    return describe_memory(peak_memory(size), "GPU" if on_gpus else "process")


def _sft_size(settings: Settings) -> SupervisedSize | None:
    if not settings.sft_data:
        return None
    rows = data_sets.encoded_demonstrations(settings)
    return _supervised(len(rows), _tokens(rows, "input_ids"), settings.sft)


def _reward_size(rows: Rows, settings: Settings) -> SupervisedSize:
    tokens = _tokens(rows, "chosen") + _tokens(rows, "rejected")
    return _supervised(len(rows), tokens, settings.reward_model_training)


def _supervised(rows: int, tokens: int, config: SupervisedConfig) -> SupervisedSize:
    return SupervisedSize(
        rows=rows,
        tokens=tokens,
        epochs=config.num_epochs,
        optimizer_steps=config.num_epochs * ceil(rows / config.rows_per_step),
    )


def _tokens(rows: Rows, column: str) -> int:
    """Return the number of token ids in a column."""
    lengths = pyarrow.compute.list_value_length(rows.table.with_format("arrow")[column])
    return int(pyarrow.compute.sum(lengths).as_py())


def _describe(size: SupervisedSize) -> str:
    return (
        f"rows {size.rows:,}, tokens {size.tokens:,}, epochs {size.epochs}, "
        f"optimizer steps {size.optimizer_steps:,}"
    )
