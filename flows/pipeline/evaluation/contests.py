"""Measure win rates between sets of answers, and test the judge that decides them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.evaluation.agreement import (
    agree_with_people,
    doubts_about_judge,
    measure_agreement,
)
from pipeline.evaluation.canaries import run_canaries
from pipeline.evaluation.compare_in_both_orders import Comparison, compare
from pipeline.evaluation.length_control import (
    length_controlled_rate,
    rate_by_length_ratio,
    style_controlled_rate,
)
from pipeline.evaluation.sequential.people_and_judge import Labels
from pipeline.evaluation.sequential.sequential_test import (
    DecidedComparison,
    StoppingRule,
    compare_until_decided,
)
from pipeline.evaluation.win_rate import compare_policies, doubts_of, measure_win_rate
from pipeline.inputs.human_labels_to_pairs import Vote
from pipeline.judges.verdict import Judge, JudgedPrompt, Verdict
from pipeline.results.evaluation import (
    ContestResult,
    JudgedContests,
    JudgeIdentity,
    PairedDifference,
    WinRate,
)
from pipeline.settings.evaluation_config import EvaluationConfig

Contest = tuple[str, str]
"""Candidate and opponent."""

CANARY_RIVALS = ("reference", "sft", "itself")
"""Contestants whose texts may be compared with canaries, in order of preference."""


@dataclass(frozen=True)
class Contestants:
    """The contestants' answers to the same prompts."""

    prompts: Sequence[JudgedPrompt]

    texts: Mapping[str, Sequence[str]]
    """One answer to each prompt, by contestant."""

    def pairs(self, contest: Contest, positions: Iterable[int]) -> "_Pairs":
        """Return the prompts, the candidate's answers and the opponent's answers at `positions`."""
        candidate, opponent = (self.texts[name] for name in contest)
        at = list(positions)
        return (
            [self.prompts[n] for n in at],
            [candidate[n] for n in at],
            [opponent[n] for n in at],
        )


_Pairs = tuple[list[JudgedPrompt], list[str], list[str]]
"""Prompts, answers of the candidate, and answers of the opponent."""


@dataclass(frozen=True)
class Contests:
    """Contests between answers to the same prompts."""

    comparisons: dict[str, Comparison]
    """Comparisons by name of the contest, `CANDIDATE_vs_OPPONENT`."""

    result: JudgedContests

    def improvement(self) -> PairedDifference | None:
        """Return PPO's win rate minus SFT's against the references; None without references."""
        if "ppo_vs_reference" not in self.comparisons:
            return None
        ppo, sft = (self.comparisons[f"{who}_vs_reference"] for who in ("ppo", "sft"))
        return compare_policies(ppo, sft)


def evaluate(
    judge: Judge,
    contestants: Contestants,
    contests: Sequence[Contest],
    *,
    rules: Mapping[Contest, StoppingRule],
    people: Sequence[Vote],
    config: EvaluationConfig,
    canaries_decide: bool = True,
    seed: int,
) -> Contests:
    """Test the judge with canaries and labels, and let the judge compare answers.

    A contest with a rule is judged until the rule decides. A contest without a rule decides
    nothing, and doubts about its rate do not make the result inconclusive. It uses the prompts of
    the contest with a rule and the same opponent; if there is none, the prompts of the first
    contest with a rule.

    Args:
        judge: the judge.
        contestants: prompts and answers. The canaries are compared with the answers of the first
            name in CANARY_RIVALS that is a contestant.
        contests: contests between the contestants.
        rules: stopping rules of the contests that decide; at least one. The contests are judged in
            this order. If a contest does not find the candidate better, the following contests use
            only the prompts of this contest.
        people: labels of people; may be empty, see `people_and_judge`.
        config: limits of invalid verdicts, flipped verdicts and kappa; beyond a limit, the result
            is inconclusive.
        canaries_decide: whether the result is inconclusive if the judge fails a canary.
        seed: seed of the order of the pairs.

    Raises:
        DataError: a contest has no valid verdict.
        JudgeError: the judge does not answer.
    """
    rival = next(name for name in CANARY_RIVALS if name in contestants.texts)
    canaries = run_canaries(judge, contestants.prompts, contestants.texts[rival])
    decided = _decide(judge, contestants, rules, people, config, seed)
    comparisons = {one: _comparison(judge, contestants, one, decided) for one in contests}
    win_rates = {
        contest: _win_rate(comparison, decided.get(contest), config)
        for contest, comparison in comparisons.items()
    }
    agreement = agree_with_people(judge, people) if people else None
    reasons = [
        *(f"{name_of(*one)}: {reason}" for one in decided for reason in win_rates[one].reasons),
        *(canaries.reasons if canaries_decide else ()),
        *(doubts_about_judge(agreement, min_kappa=config.min_kappa) if agreement else ()),
    ]
    result = JudgedContests(
        judge=JudgeIdentity(name=judge.name, version=judge.version),
        win_rate={name_of(*one): _figures(win_rates[one], comparisons[one]) for one in contests},
        canaries=canaries,
        people=agreement,
        conclusive=not reasons,
        reasons=reasons,
    )
    return Contests({name_of(*one): comparisons[one] for one in contests}, result)


def _decide(
    judge: Judge,
    contestants: Contestants,
    rules: Mapping[Contest, StoppingRule],
    people: Sequence[Vote],
    config: EvaluationConfig,
    seed: int,
) -> dict[Contest, DecidedComparison]:
    """Judge the contests with a rule, in the order of the rules."""

    def is_conclusive(comparison: Comparison) -> bool:
        return not doubts_of(comparison, config.max_invalid, config.max_flip_rate)

    found: dict[Contest, DecidedComparison] = {}
    positions = list(range(len(contestants.prompts)))
    for contest, rule in rules.items():
        pairs = contestants.pairs(contest, positions)
        one = compare_until_decided(
            judge,
            *pairs,
            rule,
            labels=Labels.of(people, *pairs),
            is_conclusive=is_conclusive,
            seed=seed,
        )
        one = replace(one, positions=[positions[n] for n in one.positions])
        found[contest] = one
        if one.test.decided != "better":
            # The candidate is already refused, so more prompts for the next contest are no use.
            positions = one.positions
    return found


def _win_rate(
    comparison: Comparison, decided: DecidedComparison | None, config: EvaluationConfig
) -> WinRate:
    return measure_win_rate(
        comparison,
        max_invalid=config.max_invalid,
        max_flip_rate=config.max_flip_rate,
        test=None if decided is None else decided.test,
        people=None if decided is None else decided.people,
    )


def name_of(candidate: str, opponent: str) -> str:
    """Return the name of a contest."""
    return f"{candidate}_vs_{opponent}"


def _comparison(
    judge: Judge,
    contestants: Contestants,
    contest: Contest,
    decided: Mapping[Contest, DecidedComparison],
) -> Comparison:
    """Return the comparison of a contest; judge the contest now if it has no rule."""
    if contest in decided:
        return decided[contest].comparison
    against_same = (one for (_, opponent), one in decided.items() if opponent == contest[1])
    positions = next(against_same, next(iter(decided.values()))).positions
    return compare(judge, *contestants.pairs(contest, positions))


def judgements(comparisons: Mapping[str, Comparison]) -> list[dict[str, Any]]:
    """Return a row for each pair of each contest: prompt, answers, outcome, and both verdicts."""
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
        for name, comparison in comparisons.items()
        for i in range(len(comparison.prompts))
    ]


def distinct_share(texts: Sequence[str]) -> float:
    """Return the number of different texts divided by the number of texts."""
    return len(set(texts)) / len(texts)


def _figures(win_rate: WinRate, comparison: Comparison) -> ContestResult:
    controlled, styled = length_controlled_rate(comparison), style_controlled_rate(comparison)
    return ContestResult(
        **vars(win_rate),
        length_controlled=controlled.rate,
        equal_length_pairs=controlled.equal,
        by_length_ratio=rate_by_length_ratio(comparison),
        agreement=measure_agreement(comparison) if comparison.members else None,
        style_controlled=styled.rate,
        equal_style_pairs=styled.equal,
    )


def _plain(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as a dict without empty fields."""
    return {key: value for key, value in asdict(verdict).items() if value not in (None, "", ())}
