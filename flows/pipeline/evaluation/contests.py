"""Win rates of answers, and tests of the judge."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.evaluation.agreement import agree_with_people, measure_agreement
from pipeline.evaluation.canaries import run_canaries
from pipeline.evaluation.comparison import Comparison, compare
from pipeline.evaluation.length_control import length_controlled_rate, rate_by_length_ratio
from pipeline.evaluation.win_rate import WinRate, measure_win_rate
from pipeline.inputs.rows import Row
from pipeline.judges.verdict import Judge, Verdict
from pipeline.settings.evaluation_config import EvaluationConfig


@dataclass(frozen=True)
class Evaluation:
    """Contests between answers to the same prompts."""

    comparisons: dict[str, Comparison]
    """Comparisons by contest, `CANDIDATE_vs_OPPONENT`."""

    win_rates: dict[str, WinRate]
    """Win rates by contest."""

    result: dict[str, Any]
    """The figures as JSON: `win_rate` by contest, `canaries`, `people`, `judge`, `conclusive`, and
    the `reasons` if it is not conclusive."""


def evaluate(
    judge: Judge,
    prompts: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    contests: Sequence[tuple[str, str]],
    *,
    people: Sequence[Row],
    config: EvaluationConfig,
    seed: int,
) -> Evaluation:
    """Let the judge compare answers, and test the judge.

    Args:
        judge: the judge.
        prompts: the prompts of the answers.
        texts: answers by contestant; `reference` is required.
        contests: pairs of candidate and opponent.
        people: rows of prompt, first, second and label that people gave; may be empty.
        config: limits above which the result is inconclusive.
        seed: seed of the intervals.

    Raises:
        DataError: the judge gave no verdict.
        JudgeError: the judge does not answer.
    """
    # First, because a judge that fails the canaries makes the large bill useless.
    canaries = run_canaries(judge, prompts, texts["reference"])
    comparisons = {
        f"{candidate}_vs_{opponent}": compare(judge, prompts, texts[candidate], texts[opponent])
        for candidate, opponent in contests
    }
    win_rates = {
        name: measure_win_rate(
            comparison,
            max_invalid=config.max_invalid,
            max_flip_rate=config.max_flip_rate,
            seed=seed,
        )
        for name, comparison in comparisons.items()
    }
    reasons = [
        *(f"{name}: {reason}" for name, rate in win_rates.items() for reason in rate.reasons),
        *canaries.reasons,
    ]
    result = {
        "judge": {"name": judge.name, "version": judge.version},
        "win_rate": {name: _figures(win_rates[name], comparisons[name]) for name in comparisons},
        "canaries": asdict(canaries),
        "people": asdict(agree_with_people(judge, people)) if people else None,
        "conclusive": not reasons,
        "reasons": reasons,
    }
    return Evaluation(comparisons, win_rates, result)


def judgements(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return a row for each pair: both answers, the outcome, and the verdict on each order."""
    return [
        {
            "contest": name,
            "prompt": comparison.prompts[i],
            "candidate": comparison.candidates[i],
            "opponent": comparison.opponents[i],
            "outcome": comparison.outcomes[i],
            "straight": _plain(comparison.straight[i]),
            "swapped": _plain(comparison.swapped[i]),
        }
        for name, comparison in evaluation.comparisons.items()
        for i in range(len(comparison.prompts))
    ]


def distinct_share(texts: Sequence[str]) -> float:
    """Return the share of different texts: 1 if no text repeats."""
    return len(set(texts)) / len(texts)


def _figures(win_rate: WinRate, comparison: Comparison) -> dict[str, Any]:
    """Return all figures of one contest."""
    return {
        **asdict(win_rate),
        "length_controlled": length_controlled_rate(comparison).rate,
        "by_length_ratio": [asdict(part) for part in rate_by_length_ratio(comparison)],
        "agreement": asdict(measure_agreement(comparison)) if comparison.members else None,
    }


def _plain(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as a row without its empty fields."""
    return {key: value for key, value in asdict(verdict).items() if value not in (None, "", ())}
