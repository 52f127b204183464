"""Make the report on the promotion or refusal of a version."""

from collections.abc import Mapping
from math import isinf

from pipeline.reports.document import (
    Document,
    Section,
    as_evidence,
    as_interval,
    as_margin,
    as_number,
    as_percent,
    as_points,
    guard_title,
)
from pipeline.reports.terminal import CONTEST_TITLES, decision_in_words
from pipeline.results.evaluation import ContestResult, Evaluation, GuardResult, PeopleAndJudge
from pipeline.results.step_records import RegisteredPolicy
from pipeline.settings.gate_configs import PromotionConfig

LITTLE = 0.1
"""Weight of the judge below which its verdicts add little to people's labels."""

REWARD_MODEL = {True: "fit", False: "accepted by hand", None: "not used"}
"""`reward_model_fit` -> words for the reward model."""


def promotion_document(
    registered: RegisteredPolicy,
    evaluation: Evaluation,
    limits: PromotionConfig,
    *,
    reward_model_fit: bool | None,
) -> Document:
    """Return the report on a version's promotion, with each measured value and its limit.

    Args:
        registered: the version, and the decision on its promotion.
        evaluation: report of the evaluation on which the decision is based.
        limits: limits of the promotion gate.
        reward_model_fit: whether the reward model passed its validation gate; None if PPO did not
            learn from it.
    """
    promotion, champion = registered.promotion, evaluation.champion
    opponent = "there was none" if champion is None else f"version {champion}"
    decision = Section(
        title="The decision",
        headers=("Version", "It is", "Judged against the champion"),
        rows=((str(promotion.version), decision_in_words(promotion), opponent),),
    )
    return Document(
        subject="Does production load this policy?",
        verdict="Promoted" if promotion.is_promoted else "Refused",
        tone="success" if promotion.is_promoted else "danger",
        reasons=(*promotion.reasons, *evaluation.notes),
        sections=(decision, _figures(registered, evaluation, limits, reward_model_fit)),
    )


def _figures(
    registered: RegisteredPolicy,
    evaluation: Evaluation,
    limits: PromotionConfig,
    reward_model_fit: bool | None,
) -> Section:
    alpha = registered.alpha
    win_rates, contest = evaluation.win_rate, evaluation.direct_contest
    own, other = evaluation.length["ppo"], evaluation.length[evaluation.rival]
    return Section(
        title="Figures and limits",
        headers=("", "Measured", "Limit"),
        rows=(
            _win_rate(win_rates, contest, limits.min_win_rate, alpha),
            _win_rate(win_rates, "ppo_vs_reference", limits.min_reference_win_rate, alpha),
            ("People's labels of these pairs", _people(win_rates[contest].people), "no limit"),
            ("KL of an answer from SFT, nats", as_number(registered.kl), _at_most(limits.max_kl)),
            (
                "Words of an answer, and of its opponent",
                f"{as_number(own)} and {as_number(other)}",
                _at_most(limits.max_length_ratio, " times the other"),
            ),
            (
                "Repeated 3-grams of words",
                as_percent(evaluation.repetition["ppo"]),
                f"at most {as_percent(limits.max_repetition)}",
            ),
            *(_guard(name, guard) for name, guard in evaluation.guards.items()),
            (
                "Evaluation",
                "conclusive" if evaluation.conclusive else "inconclusive",
                "conclusive",
            ),
            ("Reward model", REWARD_MODEL[reward_model_fit], "fit"),
            (
                "Earlier decisions on these evaluation data",
                str(registered.earlier_decisions),
                "no limit",
            ),
        ),
    )


def _at_most(limit: float, unit: str = "") -> str:
    return "no limit" if isinf(limit) else f"at most {limit:g}{unit}"


def _people(found: PeopleAndJudge | None) -> str:
    if found is None:
        return "too few labels, so a bias of the judge is not measured"
    adds = "the judge adds little"
    if found.weight >= LITTLE:
        adds = f"worth {found.worth:.0f} labels without a judge"
    return f"{found.labels}, {adds}; win rate {as_percent(found.rate)}, {as_interval(found)}"


def _guard(name: str, guard: GuardResult) -> tuple[str, str, str]:
    difference, interval = as_points(guard)
    return (
        f"Guard {guard_title(name)}",
        f"{as_percent(guard.policy)}, {difference}, {interval}",
        f"no loss is shown, or the loss is at most {as_margin(guard)}",
    )


def _win_rate(
    win_rates: Mapping[str, ContestResult], contest: str, least: float, alpha: float
) -> tuple[str, str, str]:
    if contest not in win_rates:
        return CONTEST_TITLES[contest], "there are no references", "not applied"
    rate = win_rates[contest]
    return (
        CONTEST_TITLES[contest],
        f"{as_percent(rate.rate)}, {as_interval(rate)}, evidence {as_evidence(rate)}",
        f"above {as_percent(least)}, by evidence of {1 / alpha:,.0f} : 1",
    )
