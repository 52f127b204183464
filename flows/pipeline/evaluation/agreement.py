"""Measure how often judges agree with each other and with people."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TypeAlias

import numpy as np
from scipy.stats import false_discovery_control, ttest_1samp
from sklearn.metrics import cohen_kappa_score
from statsmodels.stats.inter_rater import aggregate_raters, fleiss_kappa

from pipeline.evaluation.compare_in_both_orders import POINTS, Comparison, compare
from pipeline.evaluation.pair_accuracy import Array
from pipeline.inputs.human_labels_to_pairs import Vote
from pipeline.judges.verdict import Judge
from pipeline.results.evaluation import (
    AnnotatorTest,
    EnsembleAgreement,
    HumanAgreement,
    PairAgreement,
    TestedAnnotator,
)
from ppo_core.data.rows.dialogues import shown_prompt

OUTCOMES = tuple(POINTS)
"""Outcomes that a person's label can have."""

COST = 0.15
"""Tolerance of the alternative annotator test: the judge may win on a fraction of pairs that is
smaller than a person's fraction by at most this number. The paper uses 0.2 for experts, 0.15 for
skilled annotators and 0.1 for crowd workers."""

FALSE_DISCOVERIES = 0.05
"""False discovery rate of the test: largest expected fraction of errors among the people whom the
test finds replaceable."""

LEAST_PEOPLE, LEAST_PAIRS = 3, 30
"""Minimum number of people for the test, and minimum number of labeled pairs for each person."""

_Pair: TypeAlias = tuple[str, str, str]


def measure_agreement(comparison: Comparison) -> EnsembleAgreement:
    """Return the agreement between the judges of an ensemble."""
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


def agree_with_people(judge: Judge, votes: Sequence[Vote]) -> HumanAgreement:
    """Ask a judge about labeled pairs in both orders, and return its agreement with the labels.

    Args:
        judge: the judge to test.
        votes: labels that people gave to pairs. If votes have an `annotator`, the judge is also
            compared with each annotator, see `compare_with_annotators`.
    """
    comparison = compare(
        judge,
        [vote.prompt for vote in votes],
        [vote.first for vote in votes],
        [vote.second for vote in votes],
    )
    # Without a valid pair, raise no error: the win rate does not depend on the agreement.
    both = _valid_for_all([[vote.label for vote in votes], comparison.outcomes])
    people, judged = [label for label, _ in both], [outcome for _, outcome in both]
    counts = Counter(zip(people, judged, strict=True))
    return HumanAgreement(
        n=len(both),
        share=_share(people, judged) if both else None,
        kappa=_cohen_kappa(people, judged),
        confusion={
            label: {outcome: counts[label, outcome] for outcome in OUTCOMES} for label in OUTCOMES
        },
        invalid=len(votes) - len(both),
        judge=comparison.judge,
        alternative=compare_with_annotators(votes, comparison.outcomes),
    )


def compare_with_annotators(votes: Sequence[Vote], outcomes: Sequence[str]) -> AnnotatorTest | None:
    """Test whether the judge can replace one of the people who labeled pairs.

    This is the alternative annotator test (Calderon, Reichart and Dror, arXiv:2501.10970). Let h be
    a person, f the judge, and i a pair that h labeled. S(h, i) is the fraction of the other people
    who gave pair i the same label as h. S(f, i) is the fraction of these other people whose label
    equals the judge's outcome.

        d[i] = [S(h, i) >= S(f, i)] - [S(f, i) >= S(h, i)]

    The judge can replace h if a one-sided t-test rejects the hypothesis that the mean of d is at
    least COST. The p-values are corrected for the number of people (Benjamini and Yekutieli). The
    judge passes the test if it can replace at least half of the tested people.

    Args:
        votes: labels of people. If a person labeled a pair several times, the first label counts.
        outcomes: the judge's outcome for each vote. A vote with the outcome `invalid` is left out.

    Returns:
        The result; None if no vote with a valid outcome has an annotator. A person is tested only
        if other people also labeled at least LEAST_PAIRS of the person's pairs. The labels of a
        person who is not tested still count for the tests of the others.
    """
    labels, judged = _labels_by_pair(votes, outcomes)
    if not labels:
        return None
    people = sorted({name for own in labels.values() for name in own})
    wins = {name: _wins(name, labels, judged) for name in people}
    tested = {name: own for name, own in wins.items() if len(own) >= LEAST_PAIRS}
    if len(tested) < LEAST_PEOPLE:
        why = (
            f"The test needs {LEAST_PEOPLE} people who each labeled at least {LEAST_PAIRS} pairs "
            f"that other people labeled, too. Only {len(tested)} of {len(people)} people did."
        )
        return AnnotatorTest(people={}, cost=COST, winning_rate=None, passed=None, why=why)
    p = false_discovery_control([_p_value(own) for own in tested.values()], method="by")
    found = {
        name: TestedAnnotator(
            n=len(own),
            judge=float(own[:, 0].mean()),
            person=float(own[:, 1].mean()),
            p=float(value),
            replaceable=bool(value <= FALSE_DISCOVERIES),
        )
        for (name, own), value in zip(tested.items(), p, strict=True)
    }
    rate = sum(one.replaceable for one in found.values()) / len(found)
    return AnnotatorTest(people=found, cost=COST, winning_rate=rate, passed=rate >= 0.5, why="")


def _labels_by_pair(
    votes: Sequence[Vote], outcomes: Sequence[str]
) -> tuple[dict[_Pair, dict[str, str]], dict[_Pair, str]]:
    """Return people's labels by pair and person, and the judge's outcome by pair.

    The answers of a pair are sorted, so that both orders of two answers are the same pair.
    """
    labels: dict[_Pair, dict[str, str]] = {}
    judged: dict[_Pair, str] = {}
    exchanged = {"first": "second", "second": "first", "tie": "tie"}
    for vote, outcome in zip(votes, outcomes, strict=True):
        if vote.annotator is None or outcome == "invalid":
            continue
        one, other = sorted((vote.first, vote.second))
        pair, is_turned = (shown_prompt(vote.prompt), one, other), one != vote.first
        label, outcome = (exchanged[x] if is_turned else x for x in (vote.label, outcome))
        judged.setdefault(pair, outcome)
        labels.setdefault(pair, {}).setdefault(vote.annotator, label)
    return labels, judged


def _wins(
    name: str, labels: Mapping[_Pair, Mapping[str, str]], judged: Mapping[_Pair, str]
) -> Array:
    """Return (N, 2) of 0 and 1: the judge's wins in column 0, the person's wins in column 1.

    N is the number of pairs that the person and at least one other person labeled. The judge wins
    if it agrees with at least as many other people as the person does. The person wins if it agrees
    with at least as many other people as the judge does.
    """
    rows = []
    for pair, own in labels.items():
        others = [label for other, label in own.items() if other != name]
        if name in own and others:
            judge, person = others.count(judged[pair]), others.count(own[name])
            rows.append((judge >= person, person >= judge))
    return np.array(rows, dtype=float).reshape(-1, 2)


def _p_value(wins: Array) -> float:
    """Return the p-value of the hypothesis that the judge is worse than a person by COST or more.

    t = (mean(d) - COST) / (std(d) / sqrt(N)),   d = wins of the person - wins of the judge
    """
    differences = wins[:, 1] - wins[:, 0]
    if np.ptp(differences) == 0:  # The standard deviation is 0.
        return float(differences[0] >= COST)
    return float(ttest_1samp(differences, COST, alternative="less").pvalue)


def doubts_about_judge(people: HumanAgreement, *, min_kappa: float) -> list[str]:
    """Return the reasons why disagreement with people makes the result inconclusive; may be empty.

    If there are valid pairs but kappa is None, the judge and the people gave one single label to
    every pair, so the list is empty.
    """
    if people.n == 0:
        return [f"The judge gave no verdict on the {people.invalid} pairs that people labeled."]
    if people.kappa is None or people.kappa >= min_kappa:
        return []
    advice = "Choose another judge or criterion, or check the labels."
    labels = [label for label, row in people.confusion.items() if any(row.values())]
    if labels == ["tie"]:
        advice = "All labels are ties, so kappa cannot be above 0: label pairs that differ."
    elif len(labels) == 1:
        advice = (
            "All labels are equal, so kappa cannot be above 0: exchange first and second in half "
            "of the rows."
        )
    return [
        f"The judge disagrees with people: Cohen's kappa is {people.kappa:z.2f} on {people.n} "
        f"labeled pairs, below min_kappa={min_kappa:g}. {advice}"
    ]


def _alone(comparison: Comparison, number: int) -> Comparison:
    """Return the comparison by a single judge: the judge at index `number` of the ensemble."""
    return replace(
        comparison,
        straight=tuple(verdict.votes[number] for verdict in comparison.straight),
        swapped=tuple(verdict.votes[number] for verdict in comparison.swapped),
        judge=comparison.members[number],
        members=(),
    )


def _valid_for_all(outcomes: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the outcomes of all judges, one tuple for each pair that is valid for all judges."""
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
