"""The gate before production: which figures keep a candidate from being champion."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.agreement import doubts_about_judge
from pipeline.evaluation.evaluate_policies import mean_words, repeated_share
from pipeline.promotion.promotion_gate import reasons_to_promote, reasons_to_refuse
from pipeline.results.evaluation import (
    Evaluation,
    GuardResult,
    HumanAgreement,
    PeopleAndJudge,
    SequentialTest,
)
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.gate_configs import PromotionConfig
from ppo_core.errors import ConfigError, DataError
from tests.helpers.inputs.sample_reports import (
    changed,
    evaluation_result,
    guard_result,
    win_rate,
)

SAMPLE = evaluation_result()


def evaluation(
    *,
    champion: int | None = 2,
    evidence: float = 1000.0,
    reference_evidence: float = 1000.0,
    least: float = 0.5,
    words: float = 30.0,
    rival_words: float = 30.0,
    repetition: float = 0.1,
    doubts: tuple[str, ...] = (),
) -> Evaluation:
    rival, other = ("sft", "champion") if champion is None else ("champion", "sft")
    # Against a champion, what the candidate did to SFT no longer decides.
    others = {} if champion is None else {f"ppo_vs_{other}": win_rate(low=0.0, test=None)}
    direct, reference = (sequential_test(one, least) for one in (evidence, reference_evidence))
    return replace(
        SAMPLE,
        champion=champion,
        win_rate={
            f"ppo_vs_{rival}": win_rate(test=direct),
            "ppo_vs_reference": win_rate(test=reference),
            **others,
        },
        length={"ppo": words, rival: rival_words, other: 1.0},
        repetition={"ppo": repetition, rival: 1.0},
        conclusive=not doubts,
        reasons=list(doubts),
    )


def sequential_test(evidence: float, least: float) -> SequentialTest:
    decided = "better" if evidence >= 1000 else "undecided"
    return SequentialTest(
        least=least, alpha=0.001, evidence=evidence, decided=decided, asked=200, available=200
    )


def judged(
    *, candidate: int = 3, kl: float = 5.0, fit: bool = True, limits: Any = None, **figures: Any
) -> list[str]:
    result = evaluation(**figures)
    return reasons_to_refuse(
        result,
        limits or PromotionConfig(),
        reward_model_fit=fit,
        candidate=candidate,
        champion=result.champion,
        kl=kl,
    )


def test_a_looped_or_long_chinese_answer_is_refused():
    loop, short = ["今天天气很好。" * 40], ["今天天气很好。我们去公园散步吧。"]
    assert judged(repetition=repeated_share(short)) == []
    (reason,) = judged(repetition=repeated_share(loop))
    assert "above max_repetition=0.3" in reason
    (reason,) = judged(words=mean_words(loop), rival_words=mean_words(short))
    assert "have 280.0 words on average" in reason and "max_length_ratio=2" in reason


@pytest.mark.parametrize("champion", [None, 2])
def test_a_candidate_that_keeps_every_limit_is_promoted(champion: int | None):
    assert judged(champion=champion) == []


@pytest.mark.parametrize(
    ("name", "good", "bad", "words"),
    [
        ("evidence", [1000.0, 1e9], [999.9, 1.0, 0.0], "exceeds min_win_rate=0.5 is"),
        ("reference_evidence", [1000.0], [999.9], "exceeds min_reference_win_rate=0.5 is"),
        ("least", [0.5, 0.6], [], ""),
        ("kl", [0.0, -0.1, 20.0], [20.001, 1e9], "max_kl=20. A policy that far from SFT"),
        ("words", [15.0, 30.0, 60.0], [14.9, 60.1, 0.0], "above max_length_ratio=2, so the judge"),
        ("rival_words", [15.0, 60.0], [14.9, 60.1, 0.0], "above max_length_ratio=2, so the judge"),
        ("repetition", [0.0, 0.3], [0.3001, 1.0], "max_repetition=0.3. Users would read"),
        ("fit", [True], [False], "its reward model failed validation"),
        ("candidate", [3, 100], [2, 1], "version 2 is"),
    ],
)
@pytest.mark.parametrize("champion", [None, 2])
def test_each_limit_alone_refuses_beyond_it(
    name: str, good: list[Any], bad: list[Any], words: str, champion: int | None
):
    if name == "candidate" and champion is None:
        good, bad = [*good, *bad], []
    for value in good:
        assert judged(**{name: value}, champion=champion) == []
    for value in bad:
        (reason,) = judged(**{name: value}, champion=champion)
        assert words.lower() in reason.lower()


@pytest.mark.parametrize(
    "name", ["evidence", "reference_evidence", "kl", "words", "rival_words", "repetition"]
)
@pytest.mark.parametrize("value", [nan, inf])
def test_a_figure_that_is_not_finite_keeps_no_limit(name: str, value: float):
    assert len(judged(**{name: value})) == 1


@pytest.mark.parametrize("champion", [None, 2])
def test_without_references_their_limit_is_not_applied(champion: int | None):
    result = evaluation(champion=champion)
    result.win_rate.pop("ppo_vs_reference")
    against = reasons_to_refuse(
        result, PromotionConfig(), reward_model_fit=True, candidate=3, champion=champion, kl=5.0
    )
    assert against == []
    won, skipped = reasons_to_promote(result)
    assert won.startswith("It wins 60.0% of 200 pairs against ")
    assert skipped == "There are no references, so min_reference_win_rate was not applied."


def test_two_lengths_without_end_are_not_alike():
    assert len(judged(words=inf, rival_words=inf)) == 1


@pytest.mark.parametrize("figure", ["rate", "low", "high"])
def test_a_win_rate_that_is_no_number_refuses_whatever_its_evidence(figure: str):
    result = changed(evaluation(), {f"win_rate.ppo_vs_champion.{figure}": nan})
    (reason,) = reasons_to_refuse(
        result, PromotionConfig(), reward_model_fit=True, candidate=3, champion=2, kl=1.0
    )
    assert "nan%" in reason


def test_no_limit_on_the_divergence_still_needs_one_that_was_measured():
    limits = PromotionConfig(max_kl=inf)
    assert judged(kl=1e6, limits=limits) == []
    assert len(judged(kl=nan, limits=limits)) == len(judged(kl=inf, limits=limits)) == 1


def test_an_infinite_ratio_of_lengths_is_no_limit():
    limits = PromotionConfig(max_length_ratio=inf)
    assert judged(words=30.0, rival_words=0.0, limits=limits) == []


def test_the_limits_are_those_of_the_settings():
    limits = PromotionConfig(
        min_win_rate=0.6,
        min_reference_win_rate=0.3,
        alpha=0.01,
        max_kl=4.0,
        max_length_ratio=1.0,
        max_repetition=0.0,
    )
    figures = {"evidence": 101.0, "least": 0.6, "kl": 4.0, "repetition": 0.0}
    assert judged(**figures, limits=limits) == []
    worse = {"reference_evidence": 99.0, "kl": 4.1, "repetition": 0.01, "words": 30.1}
    # What was tested against 0.5 is not known to exceed 0.6.
    assert len(judged(**worse, limits=limits)) == 5


def test_every_reason_is_said_and_not_the_first_alone():
    reasons = judged(
        candidate=1,
        evidence=0.1,
        reference_evidence=0.1,
        kl=30.0,
        words=99.0,
        repetition=0.5,
        fit=False,
        doubts=("ppo_vs_sft: no verdict for 9 of 20 pairs", "The judge fell for 'empty'."),
    )
    assert len(reasons) == 8
    assert all(reason.endswith(".") for reason in reasons)


def test_a_reason_says_the_figure_and_whom_it_is_about():
    assert judged(evidence=12.34) == [
        "It wins 60.0% of 200 pairs against the champion, version 2, 95 % interval 51.0% .. 70.0%, "
        "judged by rule. The evidence that this rate exceeds min_win_rate=0.5 is 12.3 to 1, but "
        "alpha=0.001 needs 1,000 to 1. Either the policy is not better, or the 200 pairs that were "
        "judged (of 200) are too few to show it."
    ]
    assert "against SFT, 95 %" in judged(champion=None, evidence=0.1)[0]


def reason_with(evidence: float, **changes: Any) -> str:
    """Return the only reason against a candidate whose first contest has these figures."""
    result = evaluation(evidence=evidence)
    changed_rate = replace(result.win_rate["ppo_vs_champion"], **changes)
    (reason,) = reasons_to_refuse(
        replace(result, win_rate=result.win_rate | {"ppo_vs_champion": changed_rate}),
        PromotionConfig(),
        reward_model_fit=True,
        candidate=3,
        champion=2,
        kl=5.0,
    )
    return reason


def test_too_few_labels_of_people_are_the_reason():
    people = PeopleAndJudge(rate=0.6, low=0.3, high=0.9, labels=31, weight=0.5, worth=60.0)
    reason = reason_with(12.34, people=people)
    assert (
        "the 31 labels of people for the 200 pairs that were judged (of 200) are too few" in reason
    )


def test_a_policy_that_answers_like_the_champion_is_refused_by_name():
    reason = reason_with(1.0, wins=0, losses=0, ties=200, rate=0.5)
    assert "All 200 pairs are ties: it answers like the champion, version 2. A run" in reason
    assert "set another seed" in reason and "too few" not in reason


def test_a_win_rate_that_was_tested_against_less_than_the_limit_is_refused():
    limits = PromotionConfig(min_win_rate=0.6)
    (reason,) = judged(evidence=5000.0, limits=limits)
    assert reason.endswith(
        "tested against 0.5, but min_win_rate is 0.6 now. Judge the candidate again."
    )


def test_a_win_rate_that_was_not_tested_cannot_decide():
    untested = evaluation()
    untested.win_rate["ppo_vs_champion"] = win_rate(test=None)
    with pytest.raises(DataError, match="against the champion, version 2 was not tested"):
        reasons_to_refuse(
            untested, PromotionConfig(), reward_model_fit=True, candidate=3, champion=2, kl=1.0
        )


def test_a_reason_about_lengths_gives_the_words_of_both():
    assert judged(words=75.0)[0].startswith(
        "Its answers have 75.0 words on average, and the answers of the champion, version 2 have "
        "30.0."
    )


def test_an_inconclusive_evaluation_promotes_nobody_and_says_all_of_its_doubts():
    (reason,) = judged(evidence=1e6, doubts=("ppo_vs_sft: 9 flips", "The judge fell for 'empty'."))
    assert reason.endswith("cannot decide: ppo_vs_sft: 9 flips; The judge fell for 'empty'.")


def test_a_judge_that_disagrees_with_people_promotes_nobody():
    people = HumanAgreement(n=9, share=0.4, kappa=0.1, confusion={}, invalid=0, judge="rule")
    doubts = doubts_about_judge(people, min_kappa=EvaluationConfig().min_kappa)
    (reason,) = judged(evidence=1e6, doubts=tuple(doubts))
    assert reason.startswith("The evaluation is inconclusive, so its win rates cannot decide: The ")
    assert "Cohen's kappa is 0.10 on 9 labeled pairs, below min_kappa=0.2" in reason


def test_a_reward_model_accepted_by_hand_did_not_pass():
    (reason,) = judged(fit=False)
    assert "promote it by hand with a reason" in reason


def test_the_champion_itself_is_not_promoted_again():
    assert judged(champion=3, candidate=3) == ["Version 3 is the champion already."]


def test_a_late_run_does_not_replace_a_newer_champion():
    (reason,) = judged(champion=4, candidate=3)
    assert reason.startswith("Version 4 is champion and newer than this version 3")


@pytest.mark.parametrize(("about", "now"), [(1, 2), (None, 2), (2, None)])
def test_an_evaluation_about_another_champion_decides_nothing(about: int | None, now: int | None):
    with pytest.raises(DataError, match=rf"judged against champion {about}, but .* is now {now},"):
        reasons_to_refuse(
            evaluation(champion=about),
            PromotionConfig(),
            reward_model_fit=True,
            candidate=3,
            champion=now,
            kl=1.0,
        )


def guarded(**guards: GuardResult) -> list[str]:
    result = replace(evaluation(), guards=guards)
    return reasons_to_refuse(
        result, PromotionConfig(), reward_model_fit=True, candidate=3, champion=2, kl=1.0
    )


def test_a_guard_that_did_not_pass_refuses_by_name():
    lost = guard_result(
        policy=0.7, rival=0.99, difference=-0.29, low=-0.35, high=-0.2, passed=False
    )
    (reason,) = guarded(language=lost, stops=guard_result())
    assert reason == (
        "Guard language: 70.0% of its answers have the language of the prompt, compared with 99.0% "
        "of the answers of the champion, version 2. The difference is -29.0 points, 95 % interval "
        "-35.0 .. -20.0, on 200 prompts: the policy is worse, and a loss of more than 5 points is "
        "not ruled out. Read the answers with a low score in guards.jsonl, or change "
        "[promotion.guards] if this loss is wanted."
    )
    (reason,) = guarded(polite=lost)
    assert reason.startswith("Guard polite: its mean score is 70.0%, and the mean score of the ")
    assert len(guarded(language=lost, polite=lost)) == 2


@pytest.mark.parametrize("figure", ["difference", "low", "high"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_guard_with_a_figure_that_is_no_number_refuses(figure: str, value: float):
    assert len(guarded(stops=guard_result(**{figure: value}))) == 1


def test_what_a_promoted_candidate_won_is_told():
    assert reasons_to_promote(evaluation()) == [
        "It wins 60.0% of 200 pairs against the champion, version 2, 95 % interval 51.0% .. 70.0%, "
        "judged by rule.",
        "It wins 60.0% of 200 pairs against the references, 95 % interval 51.0% .. 70.0%, "
        "judged by rule.",
    ]
    assert "against SFT" in reasons_to_promote(evaluation(champion=None))[0]


def test_the_champion_is_the_opponent_that_decides_where_there_is_one():
    assert evaluation().direct_contest == "ppo_vs_champion"
    assert evaluation(champion=None).direct_contest == "ppo_vs_sft"


FIGURES = {
    "evidence": st.floats(0, 3000),
    "reference_evidence": st.floats(0, 3000),
    "least": st.floats(0.3, 0.7),
    "kl": st.floats(-1, 40),
    "words": st.floats(1, 100),
    "repetition": st.floats(0, 0.6),
    "fit": st.booleans(),
    "doubts": st.sampled_from([(), ("flips",)]),
    "candidate": st.integers(1, 5),
    "champion": st.sampled_from([None, 1, 2, 4]),
}


@given(figures=st.fixed_dictionaries(FIGURES), name=st.sampled_from(list(FIGURES)), data=st.data())
def test_no_worse_figure_turns_a_refusal_into_a_promotion(figures, name, data):
    worse = {**figures, name: worsened(name, figures[name], data)}
    if judged(**figures):
        assert judged(**worse)


def worsened(name: str, value: Any, data: st.DataObject) -> Any:
    """A value of a figure that speaks more against the candidate, or the same one."""
    further = data.draw(st.floats(0, 100) | st.just(nan))
    match name:
        case "evidence" | "reference_evidence" | "least":
            return value - further
        case "kl" | "repetition":
            return value + further
        case "words":  # the champion has 30
            return value + further if value > 30 else value / (1 + further)
        case "fit":
            return False
        case "doubts":
            return (*value, "canaries")
        case "candidate":
            return data.draw(st.integers(1, value))
    # A newer champion speaks against a candidate; with none, another rule decides.
    return value if value is None else value + data.draw(st.integers(0, 5))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("min_win_rate", [1.0, -0.1, nan]),
        ("min_reference_win_rate", [1.0, -0.1, nan]),
        ("max_kl", [0.0, -1.0, nan]),
        ("max_length_ratio", [0.99, nan]),
        ("max_repetition", [-0.1, 1.1, nan]),
    ],
)
def test_a_limit_that_cannot_be_kept_or_crossed_is_refused(name: str, values: list[float]):
    for value in values:
        with pytest.raises(ConfigError, match=f"{name}="):
            PromotionConfig(**{name: value})
