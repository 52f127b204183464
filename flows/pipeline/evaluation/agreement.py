"""Agreement of judges with each other and with people."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from sklearn.metrics import cohen_kappa_score
from statsmodels.stats.inter_rater import aggregate_raters, fleiss_kappa

from pipeline.evaluation.comparison import POINTS, Comparison, compare
from pipeline.judges.verdict import Judge
from ppo_core.errors import DataError

OUTCOMES = tuple(POINTS)
"""Outcomes that a person's label can have."""


@dataclass(frozen=True, kw_only=True)
class PairAgreement:
    """Agreement of two judges on the pairs that are valid for both, after both orders."""

    judges: tuple[str, str]
    """Names of the two judges."""

    n: int
    """Pairs valid for both."""

    share: float | None
    """Share of these pairs with the same outcome; None if there is no pair."""

    kappa: float | None
    """Cohen's kappa; None if there is no pair, or if all outcomes of both are the same."""


@dataclass(frozen=True, kw_only=True)
class EnsembleAgreement:
    """Outcomes of each judge of an ensemble, and their agreement."""

    outcomes: dict[str, tuple[str, ...]]
    """Outcomes of each judge by name, one for each pair, after both orders."""

    rates: dict[str, float | None]
    """Win rate of each judge over its valid pairs; None if it has no valid pair."""

    pairs: list[PairAgreement]
    """Agreement of each two judges."""

    fleiss_kappa: float | None
    """Fleiss' kappa over the pairs valid for all judges; None if there is no such pair, or if all
    outcomes are the same."""

    n: int
    """Pairs valid for all judges."""


@dataclass(frozen=True, kw_only=True)
class HumanAgreement:
    """Agreement of a judge with people's labels."""

    n: int
    """Labelled pairs for which the judge gave a verdict in both orders."""

    share: float | None
    """Share of these pairs with the same outcome as the label; None if there is no pair."""

    kappa: float | None
    """Cohen's kappa; None if there is no such pair, or if all labels and outcomes are the same."""

    confusion: dict[str, dict[str, int]]
    """Number of pairs by label and then by the judge's outcome."""

    invalid: int
    """Labelled pairs without a verdict of the judge; not in `n`."""

    judge: str
    """Name of the judge."""


def measure_agreement(comparison: Comparison) -> EnsembleAgreement:
    """Return the agreement of the judges of an ensemble with each other.

    Raises:
        DataError: the judge is no ensemble.
    """
    if not comparison.members:
        raise DataError(
            f"The judge {comparison.judge} is one judge: an agreement needs two. "
            "Compare with an ensemble."
        )
    outcomes = {
        name: _alone(comparison, number).outcomes for number, name in enumerate(comparison.members)
    }
    everyone = _valid_for_all(list(outcomes.values()))
    return EnsembleAgreement(
        outcomes=outcomes,
        rates={name: _rate(own) for name, own in outcomes.items()},
        pairs=[_pair(names, outcomes) for names in combinations(outcomes, 2)],
        fleiss_kappa=_fleiss_kappa(everyone),
        n=len(everyone),
    )


def agree_with_people(judge: Judge, rows: Sequence[Mapping[str, str]]) -> HumanAgreement:
    """Return the agreement of a judge, after both orders, with people's labels of the same pairs.

    Args:
        judge: the judge to test.
        rows: each with `prompt`, the answers `first` and `second`, and the `label` that people
            gave: `first`, `second` or `tie`.

    Raises:
        DataError: a label is none of these three.
    """
    for number, row in enumerate(rows):
        if row["label"] not in OUTCOMES:
            raise DataError(
                f"The label of row {number} is {row['label']!r}, which no judge can agree with. "
                f"A label is one of {', '.join(OUTCOMES)}."
            )
    prompts, first, second = ([row[name] for row in rows] for name in ("prompt", "first", "second"))
    comparison = compare(judge, prompts, first, second)
    # Without a valid pair this raises nothing: the win rate is independent of it.
    both = _valid_for_all([[row["label"] for row in rows], comparison.outcomes])
    people, judged = [label for label, _ in both], [outcome for _, outcome in both]
    counts = Counter(zip(people, judged, strict=True))
    return HumanAgreement(
        n=len(both),
        share=_share(people, judged) if both else None,
        kappa=_cohen_kappa(people, judged),
        confusion={
            label: {outcome: counts[label, outcome] for outcome in OUTCOMES} for label in OUTCOMES
        },
        invalid=len(rows) - len(both),
        judge=comparison.judge,
    )


def _alone(comparison: Comparison, number: int) -> Comparison:
    """Return the comparison as one judge of an ensemble made it."""
    return replace(
        comparison,
        straight=tuple(verdict.votes[number] for verdict in comparison.straight),
        swapped=tuple(verdict.votes[number] for verdict in comparison.swapped),
        judge=comparison.members[number],
        members=(),
    )


def _valid_for_all(outcomes: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the outcomes of each pair that is valid for all judges."""
    return [pair for pair in zip(*outcomes, strict=True) if "invalid" not in pair]


def _rate(outcomes: Sequence[str]) -> float | None:
    points = [POINTS[outcome] for outcome in outcomes if outcome in POINTS]
    return sum(points) / len(points) if points else None


def _pair(names: tuple[str, str], outcomes: Mapping[str, Sequence[str]]) -> PairAgreement:
    both = _valid_for_all([outcomes[name] for name in names])
    one, other = [pair[0] for pair in both], [pair[1] for pair in both]
    return PairAgreement(
        judges=names,
        n=len(both),
        share=_share(one, other) if both else None,
        kappa=_cohen_kappa(one, other),
    )


def _share(one: Sequence[str], other: Sequence[str]) -> float:
    return sum(map(str.__eq__, one, other)) / len(one)


def _cohen_kappa(one: Sequence[str], other: Sequence[str]) -> float | None:
    if len({*one, *other}) < 2:
        return None
    return float(cohen_kappa_score(one, other))


def _fleiss_kappa(outcomes: Sequence[tuple[str, ...]]) -> float | None:
    if len({outcome for pair in outcomes for outcome in pair}) < 2:
        return None
    counts, _ = aggregate_raters(np.array(outcomes))
    return float(fleiss_kappa(counts))
