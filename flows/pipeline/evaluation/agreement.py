"""Measure how often judges agree with each other and with people."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from sklearn.metrics import cohen_kappa_score
from statsmodels.stats.inter_rater import aggregate_raters, fleiss_kappa

from pipeline.evaluation.comparison import POINTS, Comparison, compare
from pipeline.judges.verdict import Judge
from pipeline.results.evaluation import EnsembleAgreement, HumanAgreement, PairAgreement
from ppo_core.errors import DataError

OUTCOMES = tuple(POINTS)
"""Outcomes that a person's label can have."""


def measure_agreement(comparison: Comparison) -> EnsembleAgreement:
    """Return the agreement of the judges of an ensemble with each other.

    Raises:
        DataError: the comparison was made by a single judge.
    """
    if not comparison.members:
        raise DataError(
            f"The judge {comparison.judge} is a single judge, but agreement is measured between "
            "at least two judges. Compare with an ensemble."
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
    """Ask a judge about labeled pairs in both orders, and return its agreement with the labels.

    Args:
        judge: the judge to test.
        rows: rows with the keys `prompt`, `first` and `second` (the answers), and `label` (given
            by people: `first`, `second` or `tie`).

    Raises:
        DataError: a label is not `first`, `second` or `tie`.
    """
    for number, row in enumerate(rows):
        if row["label"] not in OUTCOMES:
            raise DataError(
                f"The label of row {number} is {row['label']!r}, which no judge can agree with. "
                f"Change the label to one of {', '.join(OUTCOMES)}."
            )
    prompts, first, second = ([row[name] for row in rows] for name in ("prompt", "first", "second"))
    comparison = compare(judge, prompts, first, second)
    # If no pair is valid, nothing is raised: the win rate does not depend on the agreement.
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


def doubts_about_judge(people: HumanAgreement, *, min_kappa: float) -> list[str]:
    """Return why a judge that disagrees with people makes a result inconclusive; may be empty.

    If kappa is None although there are valid pairs, there is no doubt: the judge and people then
    chose one and the same label for all pairs.
    """
    if people.n == 0:
        return [f"The judge gave no verdict on the {people.invalid} pairs that people labeled."]
    if people.kappa is None or people.kappa >= min_kappa:
        return []
    advice = "Choose another judge or criterion, or check the labels."
    if sum(any(row.values()) for row in people.confusion.values()) == 1:
        advice = (
            "All labels are equal, so kappa cannot be above 0: exchange first and second in half "
            "of the rows."
        )
    return [
        f"The judge disagrees with people: Cohen's kappa is {people.kappa:z.2f} on {people.n} "
        f"labeled pairs, below min_kappa={min_kappa:g}. {advice}"
    ]


def _alone(comparison: Comparison, number: int) -> Comparison:
    """Return the comparison with only the verdicts of the ensemble's judge at index `number`."""
    return replace(
        comparison,
        straight=tuple(verdict.votes[number] for verdict in comparison.straight),
        swapped=tuple(verdict.votes[number] for verdict in comparison.swapped),
        judge=comparison.members[number],
        members=(),
    )


def _valid_for_all(outcomes: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return one tuple of all judges' outcomes for each pair that is valid for all judges."""
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
