"""Compute the sizes of a run before it starts; describe them with memory, time and price."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.cost.estimated_cost import TrainingCost, describe_memory_of, describe_time_of
from pipeline.cost.gpu_table import find_gpu, processes_on_a_machine
from pipeline.cost.memory.sizes import BF16, FP32
from pipeline.cost.run_trainings import (
    SupervisedRows,
    judge_rows,
    pair_rows,
    sft_rows,
    training_costs,
)
from pipeline.cost.training_sizes import Processes
from pipeline.evaluation.compare_in_both_orders import contests_between
from pipeline.inputs.run_data import RunData, references_of
from pipeline.inputs.run_rewards import RunRewards
from pipeline.launch.job import NUM_SAMPLE_TABLES, NUM_WATCHED
from pipeline.registry.alpha_spending import limits_now
from pipeline.settings.evaluation_config import MOST_TRIES, EvaluationConfig
from pipeline.settings.gate_configs import PromotionConfig, RewardGateConfig
from pipeline.settings.settings import Settings
from ppo_core.data.encode_prompts import encode_prompts
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.models.files.saved_precision import half_precision
from ppo_core.models.loading import count_parameters, load_config
from ppo_core.ppo.schedule import Schedule, make_schedule


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """Size of a run of the flow."""

    policy_parameters: int
    """Number of parameters of the policy."""

    reward_parameters: int
    """Number of parameters of the reward model that is given or will be trained."""

    sft: SupervisedRows | None
    """Fine-tuning of the policy; None if the policy is not fine-tuned."""

    reward_model: SupervisedRows | None
    """Training of the reward model; None if the settings name a reward model."""

    judge: SupervisedRows | None
    """Training of the judge; None if the settings name a judge."""

    validation_pairs: int
    """Number of pairs that validate the reward model."""

    sample_questions: int
    """Maximum number of questions to each judge about the policy's samples."""

    prompts: int
    """Number of prompts for PPO."""

    prompt_tokens: int
    """Number of tokens of all prompts for PPO."""

    response_length: int
    """Maximum number of tokens of a response."""

    language_models: str
    """Number of questions to the language models that score responses of PPO, as text; empty if
    there are none."""

    processes: int
    """Number of PPO processes on all machines."""

    ppo: Schedule
    """Episodes, updates and optimizer steps of PPO."""

    works: Sequence[TrainingCost]
    """The trainings; empty if their memory, time and price cannot be computed."""

    selection: str
    """Numbers of prompts, policies and questions to choose the policy, and disk space of earlier
    policies, as text; empty if the last policy is registered."""

    evaluation_prompts: int
    """Number of prompts that the policies answer."""

    contests: int
    """Number of comparisons of two policies, or of a policy with references."""

    baselines: str
    """Numbers of answers and questions to compare PPO with SFT's baselines, as text; empty if the
    baselines are off."""

    promotion: str
    """Number of prompts that a policy must win to be promoted, as text."""


def measure_run(settings: Settings, *, has_champion: bool) -> RunSize:
    """Return the sizes of a run whose inputs were checked; no weights are loaded.

    Raises:
        ConfigError: the sizes of PPO contradict each other; or see `find_gpu`.
        DataError: a row cannot be used.
        ModelError: a model cannot be read.
    """
    data = RunData(settings)
    prompts = data.training_prompts().column("prompt")
    lengths = [len(ids) for ids in encode_prompts(data.policy_tokenizer, prompts)]
    examples = data.examples()
    contestants = [
        "sft",
        "ppo",
        *(["reference"] if references_of(examples) else []),
        *(["champion"] if has_champion else []),
    ]
    gpu = find_gpu(settings.hardware)
    number = processes_on_a_machine(settings) * settings.num_nodes
    processes = Processes(number=number, machines=settings.num_nodes, on_gpus=gpu is not None)
    policy = count_parameters(settings.policy)
    reward_model = count_parameters(settings.reward_model or settings.policy, scores=True)
    schedule = make_schedule(settings.ppo, num_prompts=len(prompts), num_processes=number)
    sft, pairs, judge = sft_rows(data), pair_rows(data), judge_rows(data)
    return RunSize(
        policy_parameters=policy,
        reward_parameters=reward_model,
        sft=sft,
        reward_model=pairs,
        judge=judge,
        validation_pairs=len(data.test_pairs()),
        sample_questions=_sample_questions(settings.reward_gate, len(prompts)),
        prompts=len(prompts),
        prompt_tokens=sum(lengths),
        response_length=settings.ppo.response_length,
        language_models=_language_models(data, schedule, len(prompts)),
        processes=number,
        ppo=schedule,
        works=training_costs(settings, processes, lengths, sft=sft, pairs=pairs, judge=judge),
        selection=_selection(data, policy),
        evaluation_prompts=len(examples),
        contests=len(contests_between(contestants)),
        baselines=_baselines(settings.evaluation, len(examples)),
        promotion=_promotion(
            limits_now(settings.promotion, ()),
            len({shown_prompt(row["prompt"]) for row in examples}),
            opponents=[
                "the champion" if has_champion else "SFT",
                *(["the references"] if "reference" in contestants else []),
            ],
        ),
    )


def _promotion(limits: PromotionConfig, prompts: int, *, opponents: Sequence[str]) -> str:
    """Return how many of N different prompts must be won, and how good a policy must be for it.

    The policy must win against each of one or two opponents.
    """
    # Imported here because scipy is slow to import.
    from scipy.special import bdtri

    from pipeline.evaluation.sequential.sequential_test import StoppingRule

    against_references = limits.min_reference_win_rate if len(opponents) > 1 else 0.0
    least = max(limits.min_win_rate, against_references)
    rule = StoppingRule(least=least, gain=None, alpha=limits.alpha)
    wins = rule.least_wins(prompts)
    if wins > prompts:
        return (
            "Warning: no policy can be promoted, because the alpha of [promotion] needs at least "
            f"{rule.least_prompts()} prompts, all won, and there are {prompts} different ones. Add "
            "rows to eval_prompts, or raise alpha (or false_promotion_rate)."
        )
    # At this win rate, one of the contests misses its number of wins in at most 1/5 of the runs. A
    # rate below the gain may end the contest earlier, as "not better".
    enough = bdtri(wins - 1, prompts, 1 / 5 / len(opponents))
    rate = max(enough, limits.gain_above(least))
    return (
        f"promotion: at alpha {limits.alpha:.2g}, {wins:,} of {prompts:,} prompts "
        f"({wins / prompts:.1%}) must be won against {' and against '.join(opponents)} if none "
        f"is a tie; a policy that wins {rate:.1%} on average does so in about four of five runs"
    )


def _baselines(config: EvaluationConfig, prompts: int) -> str:
    """Return the maximum numbers of answers and questions of the baselines, as text."""
    from pipeline.evaluation.baselines import baseline_answers, baseline_names

    if not config.baseline_prompts:
        return ""
    most = min(config.baseline_prompts, prompts)
    return (
        f"prompts at most {most:,}, answers at most {baseline_answers(config) * most:,}, questions "
        f"to each judge at most {2 * len(baseline_names(config)) * most:,}"
    )


def _sample_questions(gate: RewardGateConfig, prompts: int) -> int:
    """Return the maximum number of questions about pairs of samples, each pair in both orders."""
    asked = min(max(gate.num_prompts, gate.max_prompts), prompts)
    return 2 * (gate.samples_per_prompt // 2) * asked


def _selection(data: RunData, parameters: int) -> str:
    """Return the numbers of prompts, policies and questions to choose the policy, as text.

    The text is empty if the last policy is registered. `parameters` is the number of parameters of
    the policy.
    """
    choice, earlier = data.settings.selection, data.settings.ppo.save_policies
    if choice.method == "last":
        return ""
    prompts = len(data.selection_prompts())
    policies = MOST_TRIES if choice.method == "kl" else len({*choice.weights}) + earlier
    questions = 0 if choice.method == "kl" else 2 * policies * prompts
    return (
        f"prompts {prompts:,}, policies at most {policies}, "
        f"questions to each judge at most {questions:,}"
        + (_disk_of(earlier, parameters, data.settings.policy) if earlier else "")
    )


def _language_models(data: RunData, schedule: Schedule, prompts: int) -> str:
    """Return the number of questions of PPO to the language models among the rewards, as text.

    The models score all sampled responses, and the answers to the watched prompts.
    """
    asked = RunRewards(data).language_models
    if not asked:
        return ""
    times_watched = 1 + min(NUM_SAMPLE_TABLES, schedule.num_updates)
    questions = schedule.total_episodes + min(NUM_WATCHED, prompts) * times_watched
    on_servers = questions * sum(one.kind == "openai" for one in asked)
    limit = data.settings.judging.max_calls
    text = f"questions to each of {len(asked)} language models at most {questions:,}"
    if limit is None or on_servers <= limit:
        return text
    return (
        f"{text}\nWarning: judging.max_calls={limit} is below the {on_servers:,} calls of PPO, so "
        "PPO ends before its last update, unless the replies are already stored. Raise "
        "judging.max_calls, or lower total_episodes."
    )


def _disk_of(number: int, parameters: int, policy: str) -> str:
    """Return the disk space of policies that are saved in the precision of `policy`, as text."""
    is_half = half_precision(load_config(policy).to_dict()) is not None
    size = number * parameters * (BF16 if is_half else FP32)
    return f", disk for {number} earlier policies {size / 2**30:.2g} GiB"


def describe_sizes(settings: Settings, *, has_champion: bool) -> str:
    """Return the sizes of a run in lines of text; see `measure_run`."""
    return describe_run(measure_run(settings, has_champion=has_champion))


def describe_run(size: RunSize) -> str:
    """Return the sizes of a run in lines of text."""
    reward = "trained" if size.reward_model else "given"
    questions = 2 * size.contests * size.evaluation_prompts
    ppo, tokens = size.ppo, size.ppo.total_episodes * size.response_length
    lines = [
        f"policy: parameters {size.policy_parameters:,}",
        f"reward model, {reward}: parameters {size.reward_parameters:,}",
        *([f"SFT: {_describe(size.sft)}"] if size.sft else []),
        *([f"reward model training: {_describe(size.reward_model)}"] if size.reward_model else []),
        *([f"judge training: {_describe(size.judge)}"] if size.judge else []),
        f"reward model validation: pairs {size.validation_pairs:,}, questions to each judge "
        f"at most {size.sample_questions:,}",
        f"PPO: prompts {size.prompts:,}, their tokens {size.prompt_tokens:,}, "
        f"episodes {ppo.total_episodes:,}, sampled tokens at most {tokens:,}, "
        f"updates {ppo.num_updates:,}, optimizer steps {ppo.num_optimizer_steps:,}, "
        f"processes {size.processes}",
        *([f"rewards: {size.language_models}"] if size.language_models else []),
        *([f"selection: {size.selection}"] if size.selection else []),
        f"evaluation: prompts {size.evaluation_prompts:,}, comparisons {size.contests}, "
        f"questions to each judge at most {questions:,}",
        *([f"baselines of SFT: {size.baselines}"] if size.baselines else []),
        size.promotion,
    ]
    return "\n".join(lines)


def describe_memory(size: RunSize, settings: Settings) -> str:
    """Return lines of text with the memory of the trainings and recommended settings.

    Raises:
        ConfigError: see `find_gpu`.
    """
    if not size.works:
        return "memory, time, price: not computed with offload or a file of DeepSpeed's settings."
    return "\n".join(describe_memory_of(size.works, settings))


def describe_time(size: RunSize, settings: Settings) -> str:
    """Return lines of text with time and price of the trainings; this machine may be timed.

    Raises:
        ConfigError: see `describe_time_of`.
    """
    return "\n".join(describe_time_of(size.works, settings)) if size.works else ""


def _describe(size: SupervisedRows) -> str:
    return (
        f"rows {size.rows:,}, tokens {size.tokens:,}, epochs {size.epochs}, "
        f"optimizer steps {size.optimizer_steps:,}"
    )
