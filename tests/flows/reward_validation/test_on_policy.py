"""The reward model's choices among the policy's samples, against a judge whose taste is known."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations

import numpy as np
import pytest

from pipeline.evaluation.compare_in_both_orders import PROMPTS_AT_ONCE
from pipeline.judges.function_judge import FunctionJudge
from pipeline.judges.judge_budget import Budget
from pipeline.results.reward_report import OnPolicy
from pipeline.reward_validation.on_policy import (
    ScoredSamples,
    measure_on_policy,
    wins_of_best,
)
from ppo_core.errors import DataError

Taste = Callable[[str, str], str]


def quality(text: str) -> float:
    return float(text.split()[-1])


def prefer_higher(first: str, second: str) -> str:
    return "first" if quality(first) > quality(second) else "second"


def judge_of(taste: Taste, asked: list[tuple[str, str]] | None = None) -> FunctionJudge:
    """A judge with a taste, which notes what it is asked."""

    def judge(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
        if asked is not None:
            asked.extend(pairs)
        return [taste(*pair) for pair in pairs]

    return FunctionJudge("taste", judge, "1")


def samples_of(noise: float, prompts: int, *, count: int = 8, seed: int = 0) -> ScoredSamples:
    """Samples whose score is their quality, with noise."""
    rng = np.random.default_rng(seed)
    qualities = rng.normal(size=(prompts, count))
    texts = [[f"sample {each!r}" for each in map(float, row)] for row in qualities]
    scores = qualities + noise * rng.normal(size=qualities.shape)
    return ScoredSamples([f"prompt {number}" for number in range(prompts)], texts, scores)


def measure(
    *blocks: ScoredSamples, taste: Taste = prefer_higher, least: float = 0.5
) -> OnPolicy | None:
    return measure_on_policy(
        judge_of(taste), Budget(None, None), blocks, calls_per_question=0, least=least, seed=0
    )


@pytest.mark.parametrize(("count", "k"), [(5, 2), (5, 4), (6, 2), (6, 4)])
def test_the_estimate_is_the_win_rate_over_all_choices_of_k_samples(count: int, k: int):
    rng = np.random.default_rng(count * k)
    upper = np.triu(rng.choice([0.0, 0.5, 1.0], size=(count, count)), 1)
    points = upper + np.tril(1 - upper.T, -1)  # of the row's sample against the column's
    wins = [
        points[max(chosen), other]
        for chosen in combinations(range(count), k)
        for other in set(range(count)) - set(chosen)
    ]
    pairs = np.array(list(permutations(range(count), 2)))
    estimates = wins_of_best(points[tuple(pairs.T)][:, None], pairs[:, None] + 1.0, count, k)
    assert estimates.mean() == pytest.approx(np.mean(wins))


def test_a_reward_model_with_the_judges_taste_chooses_as_well_as_can_be():
    # With the limit within the interval, all samples are judged.
    found = measure(samples_of(0.0, 256), least=0.8)
    assert found
    assert found.accuracy
    assert found.prompts == 256
    assert found.accuracy.accuracy == 1.0
    # The best of k is above one other random sample with probability k / (k + 1).
    assert found.best_of == pytest.approx({"2": 2 / 3, "4": 4 / 5}, abs=0.03)
    assert found.low < 4 / 5 < found.high


def test_pairs_of_one_prompt_are_not_independent():
    # All 4 pairs of each prompt are right: Wilson's lower end for as many prompts as pairs.
    found = measure(samples_of(0.0, 8))
    assert (found.accuracy.accuracy, found.accuracy.n) == (1.0, 4 * found.prompts)
    assert found.accuracy.low == pytest.approx(found.prompts / (found.prompts + 1.96**2), abs=1e-4)


def test_what_the_reward_model_cannot_tell_apart_is_a_random_choice():
    flat = samples_of(0.0, 256)
    found = measure(ScoredSamples(flat.prompts, flat.texts, np.zeros((256, 8))))
    assert found
    assert found.accuracy
    assert found.accuracy.accuracy == 0.5
    assert found.low < 0.5 < found.high
    assert found.usefulness == "useless"


def test_a_clear_case_asks_few_questions_and_draws_no_more_samples():
    def blocks() -> Iterator[ScoredSamples]:
        yield samples_of(0.5, 64)
        raise AssertionError("the second block is not needed")

    found = measure_on_policy(
        judge_of(prefer_higher),
        Budget(None, None),
        blocks(),
        calls_per_question=0,
        least=0.5,
        seed=0,
    )
    assert found
    assert found.prompts <= 2 * PROMPTS_AT_ONCE
    assert found.usefulness == "good"


def test_an_unclear_case_takes_the_next_block():
    found = measure(samples_of(3.0, 32), samples_of(3.0, 32, seed=1), least=0.56)
    assert found
    assert found.prompts == 64
    assert found.pairs == 64 * 4


def test_a_reward_model_that_prefers_the_worse_is_useless_and_seen_soon():
    turned = samples_of(0.0, 64)
    found = measure(ScoredSamples(turned.prompts, turned.texts, -turned.scores))
    assert found
    assert found.high < 0.5
    assert found.prompts <= 2 * PROMPTS_AT_ONCE


@pytest.mark.slow
def test_a_random_judge_is_hardly_ever_taken_for_a_useful_model():
    rng = np.random.default_rng(7)
    useful = 0
    for seed in range(100):
        verdicts: dict[frozenset[str], str] = {}

        def toss(first: str, second: str, verdicts: dict[frozenset[str], str] = verdicts) -> str:
            winner = verdicts.setdefault(
                frozenset((first, second)), str(rng.choice([first, second]))
            )
            return "first" if winner == first else "second"

        found = measure(samples_of(0.0, 64, seed=seed), taste=toss)
        assert found
        useful += found.low > 0.5
    assert useful <= 5


def test_equal_texts_tie_without_a_question():
    asked: list[tuple[str, str]] = []
    block = ScoredSamples(["p"] * 16, [["same 1"] * 8] * 16, np.zeros((16, 8)))
    found = measure_on_policy(
        judge_of(prefer_higher, asked),
        Budget(None, None),
        [block],
        calls_per_question=0,
        least=0.5,
        seed=0,
    )
    assert not asked
    assert found
    assert (found.ties, found.accuracy, found.best_of["4"]) == (64, None, 0.5)


def test_pairs_without_a_verdict_are_counted_and_change_no_rate_to_one_side():
    def sometimes(first: str, second: str) -> str:
        return "invalid" if quality(first) + quality(second) > 0 else prefer_higher(first, second)

    found = measure(samples_of(0.0, 64), taste=sometimes, least=0.65)
    assert found
    assert 0.4 < found.invalid / found.pairs < 0.6
    assert 0.5 < found.best_of["4"] < 0.75


def test_a_judge_that_never_decides_is_an_error_that_names_it():
    with pytest.raises(DataError, match="The judge taste gave no verdict on 64 pairs"):
        measure(samples_of(0.0, 64), taste=lambda first, second: "invalid")


def test_a_budget_ends_the_questions_in_order():
    # 16 prompts have 64 pairs, which are asked in both orders. A reply that cannot be read costs a
    # second call.
    for most, unread, pairs, spent in (
        (127, None, None, None),
        (128, None, 64, 128),
        (128, 10, None, None),
        (255, None, 64, 128),
        (256, None, 128, 256),
        (256, 200, 64, 256),
    ):
        budget = Budget(most, None)

        def count(
            first: str, second: str, budget: Budget = budget, unread: int | None = unread
        ) -> str:
            budget.start_call("taste", 1)
            if budget.calls == unread:
                budget.start_call("taste", 1)
            return prefer_higher(first, second)

        found = measure_on_policy(
            judge_of(count),
            budget,
            [samples_of(3.0, 64)],
            calls_per_question=1,
            least=0.56,
            seed=0,
        )
        assert (found and found.pairs) == pairs
        assert (found and found.spent["taste"].calls) == spent


def test_a_budget_does_not_limit_a_judge_that_asks_no_server():
    found = measure_on_policy(
        judge_of(prefer_higher),
        Budget(1, None),
        [samples_of(3.0, 32)],
        calls_per_question=0,
        least=0.56,
        seed=0,
    )
    assert found
    assert found.prompts == 32


def test_odd_numbers_of_samples_leave_one_of_them_out():
    found = measure(samples_of(0.0, 256, count=7), least=0.8)
    assert found
    assert (found.per_prompt, found.pairs) == (7, 256 * 3)
    assert found.best_of["4"] == pytest.approx(4 / 5, abs=0.03)
