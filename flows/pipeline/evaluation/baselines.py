"""Compare PPO with two baselines: SFT's greedy answers, and the best of several samples of SFT.

The prompts are some of the prompts on which the judge decided about the promotion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, Protocol

from pipeline.evaluation.compare_in_both_orders import (
    PROMPTS_AT_ONCE,
    Comparison,
    compare,
    first_pairs,
    joined,
)
from pipeline.evaluation.contests import judgements, name_of
from pipeline.evaluation.pair_accuracy import Array
from pipeline.evaluation.win_rate import compare_policies, measure_win_rate
from pipeline.judges.judge_budget import Budget
from pipeline.judges.judge_names import calls_per_question
from pipeline.judges.make_judge import make_judge_of_run
from pipeline.judges.verdict import Judge, JudgedPrompt
from pipeline.results.evaluation import Baseline, Baselines, WinRate
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.settings import Settings
from ppo_core.config.reward_names import read_rewards
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.errors import JudgeError, PPOError
from ppo_core.errors.out_of_memory import free_unused
from ppo_core.training.answer_prompts import Answers

SAMPLES = 4
"""Number n of samples of which the reward model chooses one."""

KL_OF_BEST = log(SAMPLES) - (SAMPLES - 1) / SAMPLES
"""Largest KL divergence that the best of n samples can have from one sample: ln n - (n - 1) / n
nats. The divergence has this value if no two samples have equal scores (arXiv:2401.01879)."""

Score = Callable[[Sequence[JudgedPrompt], Sequence[str]], Array]
"""Function that returns the rewards (N,) of one answer to each of N prompts."""


class AnswerOfSft(Protocol):
    """Function that answers prompts with the SFT policy."""

    def __call__(self, prompts: Sequence[JudgedPrompt], *, kl: bool, **changes: Any) -> Answers:
        """Return one answer to each prompt.

        Args:
            prompts: the prompts.
            kl: whether to compute the KL divergence from SFT.
            **changes: fields of the `AnswerJob` that override the settings.
        """
        ...


@dataclass(frozen=True)
class JudgedBaselines:
    """Results of the baselines, and the judged pairs."""

    results: Baselines | None
    judgements: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the judged pairs, see `contests.judgements`."""


def baseline_names(config: EvaluationConfig) -> list[str]:
    """Return the names of the baselines; `greedy` is left out if all answers are greedy."""
    if not config.baseline_prompts:
        return []
    return ["best_of_4"] if config.is_greedy else ["greedy", "best_of_4"]


def baseline_contest(name: str) -> str:
    """Return the name of a baseline's contest."""
    return name_of(name, "sft")


def baseline_answers(config: EvaluationConfig) -> int:
    """Return how many answers of SFT the baselines need for each prompt."""
    return sum(SAMPLES if name == "best_of_4" else 1 for name in baseline_names(config))


def measure_baselines(
    settings: Settings,
    prompts: Sequence[JudgedPrompt],
    ppo: Comparison,
    answer: AnswerOfSft,
    score: Score,
    spec: str,
    budget: Budget,
) -> JudgedBaselines:
    """Compare SFT's greedy answers, and the best of four samples, with ordinary samples of SFT.

    If the budget is too small or a PPOError is raised, the result states the reason. The evaluation
    does not fail, because this comparison decides nothing.

    Args:
        settings: settings of the run.
        prompts: all prompts of the evaluation.
        ppo: comparison of PPO with SFT; the baselines use the prompts of its first pairs.
        answer: function that answers prompts with SFT.
        score: function that returns the rewards of answers.
        spec: name of the judge.
        budget: counter of the judge's calls; the baselines use the calls that are left.
    """
    names = baseline_names(settings.evaluation)
    each, left = 2 * calls_per_question(spec) * len(names), budget.affordable
    count = min(settings.evaluation.baseline_prompts, len(ppo.prompts))
    if each and left is not None:
        count = min(count, left // each)
    if not count:
        return _not_measured(
            names, f"judging.max_calls leaves {left} calls, but each prompt needs {each}."
        )
    by_text = {shown_prompt(prompt): prompt for prompt in prompts}
    part = first_pairs(ppo, count)
    asked = [by_text[text] for text in part.prompts]
    try:
        texts = _answers(settings, names, asked, answer, score)
        free_unused()
        judge = make_judge_of_run(settings, spec, budget)
        return _judged(settings, texts, asked, part, judge)
    except PPOError as error:
        return _not_measured(names, str(error))


@dataclass(frozen=True)
class _Texts:
    """Answers to the prompts, and their KL divergence from SFT."""

    texts: list[str]
    kl: float | None


def _answers(
    settings: Settings,
    names: Sequence[str],
    prompts: Sequence[JudgedPrompt],
    answer: AnswerOfSft,
    score: Score,
) -> dict[str, _Texts]:
    config = settings.evaluation
    samples_all = bool(config.temperature) and config.top_k == 0 and config.top_p == 1
    found = {}
    if "greedy" in names:
        greedy = answer(
            prompts,
            kl=samples_all,
            temperature=0.0,
            reference_temperature=config.temperature,
        )
        found["greedy"] = _Texts(greedy.texts, greedy.kl)
    repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
    samples = answer(
        repeated,
        kl=False,
        # Greedy samples would be equal.
        temperature=settings.ppo.temperature if config.is_greedy else config.temperature,
        top_k=0 if config.top_k == 1 else config.top_k,
        # The ordinary samples use `seed`, and `policy_selection` uses `seed + 1`.
        seed=(settings.seed + 2) % 2**32,
    ).texts
    # Free the memory of the policy before the reward model is loaded.
    free_unused()
    best = score(repeated, samples).reshape(-1, SAMPLES).argmax(axis=1)
    chosen = [samples[SAMPLES * row + column] for row, column in enumerate(best)]
    found["best_of_4"] = _Texts(chosen, KL_OF_BEST if samples_all else None)
    return found


def _judged(
    settings: Settings,
    answers: dict[str, _Texts],
    prompts: Sequence[JudgedPrompt],
    ppo: Comparison,
    judge: Judge,
) -> JudgedBaselines:
    """Let the judge compare each baseline with the ordinary samples of SFT."""

    def win_rate(comparison: Comparison) -> WinRate:
        config = settings.evaluation
        return measure_win_rate(
            comparison, max_invalid=config.max_invalid, max_flip_rate=config.max_flip_rate
        )

    comparisons = _compare(judge, prompts, answers, ppo.opponents)
    count = len(next(iter(comparisons.values())).prompts)
    ppo = first_pairs(ppo, count)
    found = {
        name: Baseline(
            win_rate=win_rate(comparison),
            kl=answers[name].kl,
            gain=compare_policies(ppo, comparison),
            why="",
        )
        for name, comparison in comparisons.items()
    }
    results = Baselines(found=found, ppo=win_rate(ppo), note=_note(settings))
    contests = {baseline_contest(name): one for name, one in comparisons.items()}
    return JudgedBaselines(results, judgements(contests))


def _compare(
    judge: Judge,
    prompts: Sequence[JudgedPrompt],
    answers: dict[str, _Texts],
    opponents: Sequence[str],
) -> dict[str, Comparison]:
    """Compare the answers to as many of the prompts as the judge's budget allows.

    Raises:
        JudgeError: the judge does not answer the first PROMPTS_AT_ONCE prompts.
    """
    parts: list[dict[str, Comparison]] = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        own = slice(start, start + PROMPTS_AT_ONCE)
        try:
            parts.append(
                {
                    name: compare(judge, prompts[own], one.texts[own], opponents[own])
                    for name, one in answers.items()
                }
            )
        except JudgeError:
            if not parts:
                raise
            break
    judged = {name: [part[name] for part in parts] for name in answers}
    count = sum(len(part.prompts) for part in next(iter(judged.values())))
    return {name: joined(own, range(count)) for name, own in judged.items()}


def _note(settings: Settings) -> str:
    if all(one.is_own for one in read_rewards(settings.rewards)):
        return ""
    return (
        "The best of 4 samples was chosen by the reward model of the run alone, but PPO was "
        "trained with the sum of `rewards`."
    )


def _not_measured(names: Sequence[str], why: str) -> JudgedBaselines:
    nothing = Baseline(win_rate=None, kl=None, gain=None, why=why)
    return JudgedBaselines(Baselines(found=dict.fromkeys(names, nothing), ppo=None, note=""))
