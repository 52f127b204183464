"""The promotion gate: reasons to refuse a candidate, and reasons to promote it."""

from collections.abc import Mapping
from math import isfinite, isinf

from pipeline.reports.document import as_margin, as_points
from pipeline.results.evaluation import Evaluation, GuardResult, WinRate
from pipeline.settings.gate_configs import BUILT_IN_GUARDS, PromotionConfig
from ppo_core.errors import DataError


def reasons_to_refuse(
    evaluation: Evaluation,
    limits: PromotionConfig,
    *,
    reward_model_fit: bool,
    candidate: int,
    champion: int | None,
    kl: float,
) -> list[str]:
    """Return the reasons to refuse a candidate, as sentences; empty if it passes the gate.

    Without references, the limit on the win rate against references does not apply.

    If a value violates its limit, the reason gives the value, the limit, and the risk of promoting
    anyway. A value that is not finite violates its limit.

    Args:
        evaluation: evaluation report of the candidate against this champion.
        limits: limits of the measured values.
        reward_model_fit: True if the reward model passed its validation gate, or if PPO does not
            use this model.
        candidate: version of the candidate.
        champion: version of the current champion; None if there is no champion.
        kl: KL divergence of the candidate from SFT, in nats per answer.

    Raises:
        DataError: the evaluation compares the candidate with a different champion, or a win rate
            was not tested against its limit.
    """
    if evaluation.champion != champion:
        raise DataError(
            f"The candidate was judged against champion {evaluation.champion}, but the champion "
            f"is now {champion}, so the win rate does not apply. Judge the candidate again."
        )
    win_rates = evaluation.win_rate
    found = [
        _age(candidate, champion),
        _inconclusive(evaluation),
        _wins(win_rates[evaluation.direct_contest], _opponent(champion), limits, "min_win_rate"),
        _against_references(win_rates, limits),
        _divergence(kl, limits),
        _length(evaluation, limits),
        _repetition(evaluation, limits),
        *(_guard(name, one, champion) for name, one in evaluation.guards.items()),
        _reward_model(reward_model_fit),
    ]
    return [reason for reason in found if reason]


def reasons_to_promote(evaluation: Evaluation) -> list[str]:
    """Return a promoted candidate's win rates, as sentences for the history of decisions."""
    win_rates = evaluation.win_rate
    against_references = win_rates.get("ppo_vs_reference")
    return [
        f"{_won(win_rates[evaluation.direct_contest], _opponent(evaluation.champion))}.",
        f"{_won(against_references, 'the references')}."
        if against_references
        else "There are no references, so min_reference_win_rate was not applied.",
    ]


def _opponent(champion: int | None) -> str:
    return "SFT" if champion is None else f"the champion, version {champion}"


def _won(win_rate: WinRate, opponent: str) -> str:
    won = (
        f"It wins {win_rate.rate:.1%} of {win_rate.n} pairs against {opponent}, 95 % "
        f"interval {win_rate.low:.1%} .. {win_rate.high:.1%}, judged by {win_rate.judge}"
    )
    if (people := win_rate.people) is None:
        return won
    return (
        f"{won}; with {people.labels} labels of people, it wins {people.rate:.1%}, interval "
        f"{people.low:.1%} .. {people.high:.1%}"
    )


def _age(candidate: int, champion: int | None) -> str:
    if champion is None or champion < candidate:
        return ""
    if champion == candidate:
        return f"Version {candidate} is the champion already."
    return (
        f"Version {champion} is champion and newer than this version {candidate}, so the promotion "
        "would replace a newer policy by an older one."
    )


def _inconclusive(evaluation: Evaluation) -> str:
    if evaluation.conclusive:
        return ""
    doubts = "; ".join(reason.rstrip(".") for reason in evaluation.reasons)
    return f"The evaluation is inconclusive, so its win rates cannot decide: {doubts}."


def _wins(win_rate: WinRate, opponent: str, limits: PromotionConfig, name: str) -> str:
    least, test = getattr(limits, name), win_rate.test
    if test is None:
        raise DataError(
            f"The win rate against {opponent} was not tested against {name}={least:g}, so it "
            "cannot decide. Judge the candidate again."
        )
    if test.least < least:
        return (
            f"{_won(win_rate, opponent)}. This win rate was tested against {test.least:g}, but "
            f"{name} is {least:g} now. Judge the candidate again."
        )
    needed = 1 / limits.alpha
    finite = all(map(isfinite, (win_rate.rate, win_rate.low, win_rate.high, test.evidence)))
    if finite and test.evidence >= needed:
        return ""
    why = (
        f"Either the policy is not better, or the {test.asked} pairs that were judged (of "
        f"{test.available}) are too few to show it."
    )
    if win_rate.people is not None:
        why = (
            f"Either the policy is not better, or the {win_rate.people.labels} labels of people "
            f"for the {test.asked} pairs that were judged (of {test.available}) are too few to "
            "show it."
        )
    if 0 < win_rate.n == win_rate.ties:
        why = (
            f"All {win_rate.n} pairs are ties: it answers like {opponent}. A run whose settings "
            "and data did not change makes the same policy again. Change them, or set another seed."
        )
    return (
        f"{_won(win_rate, opponent)}. The evidence that this rate exceeds {name}={least:g} is "
        f"{test.evidence:.3g} to 1, but alpha={limits.alpha:g} needs {needed:,.0f} to 1. {why}"
    )


def _against_references(win_rates: Mapping[str, WinRate], limits: PromotionConfig) -> str:
    win_rate = win_rates.get("ppo_vs_reference")
    if win_rate is None:
        return ""
    return _wins(win_rate, "the references", limits, "min_reference_win_rate")


def _divergence(kl: float, limits: PromotionConfig) -> str:
    if isfinite(kl) and kl <= limits.max_kl:
        return ""
    return (
        f"The KL divergence from SFT is {kl:.3g} nats per answer, above max_kl={limits.max_kl:g}. "
        "A policy that far from SFT usually exploits faults of the reward model."
    )


def _length(evaluation: Evaluation, limits: PromotionConfig) -> str:
    own, other = evaluation.length["ppo"], evaluation.length[evaluation.rival]
    most, finite = limits.max_length_ratio, isfinite(own) and isfinite(other)
    # Infinity turns the limit off. It is tested first, because inf * 0 words is not a number.
    if finite and (isinf(most) or (own <= most * other and other <= most * own)):
        return ""
    return (
        f"Its answers have {own:.1f} words on average, and the answers of "
        f"{_opponent(evaluation.champion)} have {other:.1f}. The ratio is above "
        f"max_length_ratio={most:g}, so the judge may have decided by length alone."
    )


def _repetition(evaluation: Evaluation, limits: PromotionConfig) -> str:
    share = evaluation.repetition["ppo"]
    if share <= limits.max_repetition:
        return ""
    return (
        f"{share:.1%} of the 3-grams of words in its distinct answers repeat an earlier 3-gram, "
        f"above max_repetition={limits.max_repetition:g}. Users would read the same words "
        "repeatedly."
    )


def _guard(name: str, result: GuardResult, champion: int | None) -> str:
    if result.passed and all(map(isfinite, (result.difference, result.low, result.high))):
        return ""
    opponent, own, other = _opponent(champion), f"{result.policy:.1%}", f"{result.rival:.1%}"
    if name in BUILT_IN_GUARDS:
        scores = (
            f"{own} of its answers {BUILT_IN_GUARDS[name]}, compared with {other} of the answers "
            f"of {opponent}"
        )
    else:
        scores = f"its mean score is {own}, and the mean score of {opponent} is {other}"
    difference, interval = as_points(result)
    if result.is_task:
        scores = f"the policy scores {own} on this task, and {opponent} {other}"
        unit, advice = "documents", "the documents with a low score in tasks.jsonl"
    else:
        unit, advice = "prompts", "the answers with a low score in guards.jsonl"
    return (
        f"Guard {name}: {scores}. The difference is {difference}, 95 % interval {interval}, on "
        f"{result.n} {unit}: the policy is worse, and a loss of more than "
        f"{as_margin(result)} is not ruled out. Read {advice}, or "
        "change [promotion.guards] if this loss is wanted."
    )


def _reward_model(fit: bool) -> str:
    if fit:
        return ""
    return (
        "Its reward model failed validation (see its report) and was accepted by hand, so PPO may "
        "have exploited its faults. To use this version anyway, promote it by hand with a reason."
    )
