"""What a guard refuses: the interval by hand, equal policies, and policies that lost something."""

import numpy as np
import pytest

from pipeline.evaluation.confidence_interval import BETS
from pipeline.evaluation.guards.compare import compare_by_guards, compare_scores
from pipeline.settings.gate_configs import GuardsConfig
from ppo_core.training.answer_prompts import Answers

QUESTION = "What is the capital of this country, and is it old?"
ANSWER = "It is the old city on the river, and that is where the king was born."
IN_GERMAN = "Es ist die alte Stadt an dem Fluss, und der König ist auch dort geboren."
REFUSAL = "I'm sorry, but I can't help with that."
RESAMPLES = 1_000


def compared(own: list[float], other: list[float], *, margin: float = 0.05, prompts=None):
    prompts = prompts or [str(number) for number in range(len(own))]
    return compare_scores(prompts, np.array(own), np.array(other), margin=margin, source="built-in")


def test_the_upper_end_is_where_the_bets_against_it_gain_a_factor_of_40():
    # Every difference is -1. Against the mean 0, a bet b multiplies its capital by 1 + b each time.
    for losses in (8, 9):
        result = compared([0.0] * losses, [1.0] * losses)
        capital = np.mean((1 + BETS) ** losses)
        assert (capital >= 40) == (losses == 9)
        assert result.passed == (losses == 8)
        assert (result.high < 0) == (losses == 9)
        assert (result.policy, result.rival, result.difference) == (0, 1, -1)
        assert result.n == losses


def test_a_loss_that_is_shown_to_be_within_the_margin_passes():
    own = [0.0] * 20 + [1.0] * 1_980
    result = compared(own, [1.0] * 2_000)
    assert result.high < 0  # it is worse, but only by 1 point
    assert result.low > -0.05
    assert result.passed
    assert not compared(own, [1.0] * 2_000, margin=0.01).passed


def test_answers_to_equal_prompts_count_as_one():
    own, other = [0.0] * 40, [1.0] * 40
    assert not compared(own, other).passed
    result = compared(own, other, prompts=[str(number // 8) for number in range(40)])
    assert (result.n, result.passed) == (5, True)


def test_a_better_policy_passes():
    assert compared([1.0] * 500, [0.0] * 500).passed


BAD = {
    "has_text": "",
    "answers": REFUSAL,
    "refuses": ANSWER,
    "language": IN_GERMAN,
    "format": "No sentence",
}
"""An answer that each guard gives no point."""


@pytest.mark.parametrize("guard", ["stops", *BAD])
def test_a_guard_gives_each_good_answer_a_point(guard: str):
    is_bad = [number % 3 == 0 for number in range(30)]
    good = REFUSAL if guard == "refuses" else ANSWER
    texts = [BAD.get(guard, good) if bad else good for bad in is_bad]
    answers = Answers(texts=texts, kl=None, stopped=[not bad for bad in is_bad])
    config = GuardsConfig(format=r"[A-Z].*\.")
    found = compare_by_guards(config, [QUESTION] * 30, {"ppo": answers, "sft": answers}, "sft")
    assert found.scores[guard]["ppo"].tolist() == [not bad for bad in is_bad]
    assert found.results[guard].passed


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.03, 0.2])
def test_an_equal_policy_passes_in_99_percent_of_the_resamples(share: float):
    # The scores of a built-in guard are 0 or 1, so its resamples depend on the share of 0 alone.
    prompts = [str(number) for number in range(128)]
    rng, passed = np.random.default_rng(0), 0
    for _ in range(RESAMPLES):
        own, other = (rng.random((2, 128)) >= share).astype(float)
        # The upper end is at least the difference.
        passed += own.mean() >= other.mean() or compared(own, other, prompts=prompts).passed
    assert passed >= 0.99 * RESAMPLES


@pytest.mark.parametrize(
    ("guard", "own", "other"),
    [
        ("answers", REFUSAL, ANSWER),
        ("refuses", ANSWER, REFUSAL),
        ("language", IN_GERMAN, ANSWER),
        ("language", "Это старый город на реке.", ANSWER),
        ("language", "这是河边的古城。", ANSWER),
        ("has_text", "\u200b\n", ANSWER),
        ("format", "It", ANSWER),
    ],
)
def test_a_policy_whose_answers_lost_a_property_is_refused_by_its_guard_alone(
    guard: str, own: str, other: str
):
    prompts = [f"{QUESTION} {number}" for number in range(32)]
    config = GuardsConfig(format=r"[A-Z].*\.") if guard == "format" else GuardsConfig()
    half = [own if number % 2 else ANSWER for number in range(32)]
    rival = [other if number % 2 else ANSWER for number in range(32)]
    answers = {
        "ppo": Answers(texts=half, kl=None, stopped=[True] * 32),
        "champion": Answers(texts=rival, kl=None, stopped=[True] * 32),
    }
    results, _, notes = compare_by_guards(config, prompts, answers, "champion")
    assert [name for name, result in results.items() if not result.passed] == [guard]
    assert notes == []


def test_a_policy_that_no_longer_stops_is_refused_by_name():
    prompts = [f"{QUESTION} {number}" for number in range(32)]
    endless = Answers(texts=[ANSWER] * 32, kl=None, stopped=[True] * 16 + [False] * 16)
    sft = Answers(texts=[ANSWER] * 32, kl=None, stopped=[True] * 32)
    results = compare_by_guards(
        GuardsConfig(), prompts, {"ppo": endless, "sft": sft}, "sft"
    ).results
    assert [name for name, result in results.items() if not result.passed] == ["stops"]
    assert results["stops"].policy == 0.5


def test_a_guard_that_cannot_be_measured_is_named():
    prompts = [f"{QUESTION} {number}" for number in range(4)]
    sft = Answers(texts=[ANSWER] * 4, kl=None, stopped=[True] * 4)
    champion = Answers(texts=[ANSWER] * 4, kl=None, stopped=None)
    answers = {"ppo": sft, "sft": sft, "champion": champion}
    results, scores, notes = compare_by_guards(GuardsConfig(), prompts, answers, "champion")
    assert "stops" not in results
    assert set(scores["stops"]) == {"ppo", "sft"}
    assert notes == [
        "The guard stops was not applied: the answers of champion were sampled without a stop "
        "token."
    ]
