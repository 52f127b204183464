import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from pipeline.evaluation.pair_accuracy import hits, measure_rate
from pipeline.inputs.labeled_pairs import LabeledPair, label_pairs
from pipeline.results.reward_report import Accuracy
from pipeline.reward_validation.accuracy import ANCHORS, measure_accuracy
from pipeline.reward_validation.scores import TextScorer, score_pairs
from ppo_core.data.rows.read_rows import read_rows
from ppo_core.errors import DataError, ModelError
from ppo_core.models.loading import load_reward_model
from ppo_core.models.reward_model import RewardModel
from tests.helpers.inputs.pipeline_inputs import write_model
from tests.helpers.paths import SHARED

DATA = SHARED / "sentiment-pairs"


@pytest.fixture
def reward_model(tmp_path: Path) -> RewardModel:
    return load_reward_model(write_model(tmp_path, labels=1))


def pair(chosen: str = "a", rejected: str = "b", **fields) -> LabeledPair:
    return LabeledPair(prompt="w9", chosen=chosen, rejected=rejected, **fields)


def measure(margins: list[float], pairs: list[LabeledPair]) -> Accuracy:
    """The accuracy of a model whose rejected responses all score 1."""
    return measure_accuracy([1 + margin for margin in margins], [1.0] * len(margins), pairs)


def test_pairs_are_scored_with_their_prompt_the_chosen_ones_first(reward_model: RewardModel):
    pairs = [pair("w1 w2", "w3"), LabeledPair(prompt="", chosen="w4", rejected="w5")]
    chosen, rejected = score_pairs(TextScorer(reward_model), pairs)
    one = [reward_model.score_texts(["w9"], [text]).item() for text in ("w1 w2", "w3")]
    other = [reward_model.score_texts([""], [text]).item() for text in ("w4", "w5")]
    assert chosen == pytest.approx([one[0], other[0]], abs=1e-6)
    assert rejected == pytest.approx([one[1], other[1]], abs=1e-6)
    assert chosen.dtype == rejected.dtype == "float64"


@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused_with_their_pair(
    reward_model: RewardModel, side: str, value: float
):
    # Only the token of w7 is broken.
    with torch.no_grad():
        reward_model.model.get_input_embeddings().weight[7 + 3] = value
    bad = pair("w7", "w2") if side == "chosen" else pair("w2", "w7")
    with pytest.raises(ModelError, match=r"1 of 2 labeled pairs .* not finite.* number 2, .*'w7'"):
        score_pairs(TextScorer(reward_model), [pair("w1", "w2"), bad])


def test_tokens_that_the_model_lacks_are_refused_before_they_are_looked_up(
    reward_model: RewardModel,
):
    reward_model.tokenizer.add_tokens(["new"])
    score_pairs(TextScorer(reward_model), [pair("w1", "w2")])
    with pytest.raises(
        ModelError, match=r"gives id 61 in the labeled pairs.* only for ids below 61"
    ):
        score_pairs(TextScorer(reward_model), [pair("w1", "w2"), pair("w1 new", "w2")])


def test_equal_scores_are_half_a_hit_in_accuracy():
    # Hits 1 + 1 + 1/2 + 0 of 4. Wilson with z = 1.96: centre (.625 + z2/8) / (1 + z2/4) = .5638,
    # half-width z * sqrt(.625 * .375 / 4 + z2/64) / (1 + z2/4) = .3440.
    result = measure([2.0, 0.5, 0.0, -1.0], [pair()] * 4)
    assert (result.accuracy, result.n) == (0.625, 4)
    assert result.low == pytest.approx(0.5638 - 0.3440, abs=1e-3)
    assert result.high == pytest.approx(0.5638 + 0.3440, abs=1e-3)
    assert result.random == 0.5
    assert result.anchors == ANCHORS == {"1B": 0.628, "2.8B": 0.669, "6.9B": 0.689}


def test_the_other_way_round_a_model_is_as_wrong_as_it_was_right():
    rng = Random(0)
    margins = [rng.choice([-1.0, 0.0, 1.0, 2.0]) for _ in range(50)]
    there, back = (
        measure_rate(hits(margins), np.arange(50)),
        measure_rate(hits([-margin for margin in margins]), np.arange(50)),
    )
    assert there.accuracy == pytest.approx(1 - back.accuracy)
    assert there.low == pytest.approx(1 - back.high)


def test_right_pairs_of_one_prompt_count_once_in_every_interval():
    # 12 right pairs of 4 prompts, one of which is a category: Wilson's lower end for 4 of 4.
    pairs = [
        LabeledPair(
            prompt=f"w{n % 4}", chosen="long", rejected="s", margin=float(n // 4), category="x"
        )
        for n in range(12)
    ]
    result = measure([1.0] * 12, pairs)
    rates = [result, result.longer, result.by_category["x"], result.by_margin["> 0"]]
    assert [rate.n for rate in rates] == [12, 12, 12, 8]
    assert [rate.low for rate in rates] == pytest.approx([4 / (4 + 1.96**2)] * 4, abs=1e-4)


def test_ties_are_no_part_of_any_accuracy():
    decided = [pair("longer", "text", margin=float(i), category="x") for i in range(1, 5)]
    ties = [pair("longer", "text", margin=9.0, category="y", tie=True)] * 3
    margins = [1.0, -1.0, 1.0, 1.0]
    alone, together = measure(margins, decided), measure([-5, -5, -5, *margins], ties + decided)
    for name in ("accuracy", "low", "high", "n", "by_margin", "by_category", "longer"):
        assert getattr(alone, name) == getattr(together, name)
    assert together.ties.n == 3
    assert alone.ties.n == 0


def test_without_a_preference_there_is_nothing_to_measure():
    for pairs in ([pair(tie=True)] * 2, []):
        with pytest.raises(DataError, match=rf"None of the {len(pairs)} held-out pairs"):
            measure([1.0] * len(pairs), pairs)


def test_accuracy_by_what_people_rated_is_cumulative():
    # Ratings 1 .. 5, ten each; right above 2 only. Above 1: 30 of 40; above 2, 3, 4: all.
    pairs = [pair(margin=float(rating)) for rating in range(1, 6) for _ in range(10)]
    result = measure([1.0 if p.margin > 2 else -1.0 for p in pairs], pairs)
    assert result.margin_of == "people"
    assert {name: (rate.accuracy, rate.n) for name, rate in result.by_margin.items()} == {
        "> 1": (0.75, 40),
        "> 2": (1.0, 30),
        "> 3": (1.0, 20),
        "> 4": (1.0, 10),
    }


@pytest.mark.parametrize(
    ("least", "most", "names"),
    [
        (1.0, 5.7, ["> 1", "> 2", "> 3", "> 4", "> 5"]),
        (0.0, 1.0, ["> 0", "> 0.2", "> 0.4", "> 0.6", "> 0.8"]),
        (0.0, 90.0, ["> 0", "> 20", "> 40", "> 60", "> 80"]),
        (-2.0, 3.1, ["> 0", "> 1", "> 2"]),
        (1000.0, 1004.0, ["> 1000", "> 1001", "> 1002", "> 1003"]),
    ],
)
def test_thresholds_are_round_and_fit_the_ratings(least: float, most: float, names: list[str]):
    pairs = [pair(margin=least + (most - least) * i / 999) for i in range(1000)]
    result = measure([1.0] * 1000, pairs)
    assert [*result.by_margin] == names
    counts = [rate.n for rate in result.by_margin.values()]
    assert counts == sorted(set(counts), reverse=True)
    assert counts[-1] >= 100


def test_no_threshold_is_the_largest_rating():
    # 0.035 / 0.005 is a little more than 7, and 7 * 0.005 is 0.035: above it is not a pair.
    ratings = (0.002, 0.016, 0.019, 0.02, 0.027, 0.03, 0.034, 0.035, 0.035)
    pairs = [pair(margin=rating) for rating in ratings]
    counts = {name: rate.n for name, rate in measure([1.0] * 9, pairs).by_margin.items()}
    assert counts == {"> 0.005": 8, "> 0.02": 5, "> 0.03": 3}


def test_pairs_that_nobody_rated_are_above_no_threshold():
    pairs = [pair(margin=1.0), pair(margin=2.0), pair(margin=3.0), pair()]
    assert measure([1.0] * 4, pairs).by_margin["> 1"].n == 2


@pytest.mark.parametrize("margin", [None, 2.0])
def test_without_ratings_that_differ_the_model_s_own_margins_divide_the_pairs(margin):
    # Own margins 1 .. 8, every other one wrong among the smaller half, two a quarter.
    margins = [-1.0, 2.0, 3.0, -4.0, 5.0, 6.0, 7.0, 8.0]
    result = measure(margins, [pair(margin=margin)] * 8)
    assert result.margin_of == "model"
    assert {name: (rate.accuracy, rate.n) for name, rate in result.by_margin.items()} == {
        "quarter 1 of the model's margins, up to 2": (0.5, 2),
        "quarter 2 of the model's margins, up to 4": (0.5, 2),
        "quarter 3 of the model's margins, up to 6": (1.0, 2),
        "quarter 4 of the model's margins, up to 8": (1.0, 2),
    }


def test_a_model_that_scores_all_alike_has_one_quarter():
    result = measure([0.0] * 8, [pair()] * 8)
    assert [rate.n for rate in result.by_margin.values()] == [8]


def test_categories_stand_by_size_and_pairs_without_one_in_none():
    pairs = [pair(category=name) for name in ("b", "a", "a", "c", "c", "c")] + [pair()]
    result = measure([1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0], pairs)
    rates = {name: (rate.accuracy, rate.n) for name, rate in result.by_category.items()}
    assert rates == {"c": (1.0, 3), "a": (0.5, 2), "b": (1.0, 1)}
    assert [*rates] == ["c", "a", "b"]
    assert measure([1.0], [pair()]).by_category == {}


def test_the_longer_response_is_a_baseline_whatever_the_model_says():
    pairs = [pair("long", "s"), pair("long", "s"), pair("s", "long"), pair("same", "size")]
    for margin in (1.0, -1.0):
        longer = measure([margin] * 4, pairs).longer
        assert (longer.accuracy, longer.n) == (2.5 / 4, 4)


def test_ties_are_told_apart_by_the_size_of_the_margin():
    # Sizes: ties 1 and 3; decided 2, 4, 4. Of the 6 comparisons decided wins all but 2 < 3: 5/6.
    pairs = [pair(tie=True)] * 2 + [pair()] * 3
    ties = measure([-1.0, 3.0, 2.0, -4.0, 4.0], pairs).ties
    assert (ties.n, ties.identical, ties.margin) == (2, 0, 2.0)
    assert ties.decided_margin == pytest.approx(10 / 3)
    assert ties.auc == pytest.approx(5 / 6)


def test_twice_the_same_text_says_nothing_about_ties():
    pairs = [pair(), pair("a", "a", tie=True), pair("a", "a", tie=True)]
    ties = measure([2.0, 0.0, 0.0], pairs).ties
    assert (ties.n, ties.identical, ties.margin, ties.auc) == (0, 2, None, None)
    with_a_tie = measure([2.0, 0.0, 0.0, 1.0], [*pairs, pair(tie=True)]).ties
    assert (with_a_tie.n, with_a_tie.identical, with_a_tie.margin) == (1, 2, 1.0)


def test_people_s_agreement_stands_beside_that_of_coins():
    # Two coins agree in half of the cases and split else: (1 + .5) / 2 = .75. Three: 2 of 8 times
    # all three, else two of three: (2 * 1 + 6 * 2/3) / 8 = .75. Five: (2 + 10 * .8 + 20 * .6) / 32.
    pairs = [
        pair(),
        pair(votes=2, agreement=0.5, tie=True),
        pair(votes=3, agreement=1.0),
        pair(votes=5, agreement=0.6),
    ]
    people = measure([1.0] * 4, pairs).people
    assert people.mean == pytest.approx(0.7)
    assert people.n == 3
    assert people.by_chance == pytest.approx((0.75 + 0.75 + 22 / 32) / 3)
    assert measure([1.0], [pair()]).people is None


def test_votes_of_coins_agree_as_often_as_expected_by_chance():
    rng = Random(3)
    rows = []
    for number in range(4000):
        for _ in range(rng.choice([2, 3, 4])):
            sides = rng.sample([f"a{number}", f"b{number}"], 2)
            rows.append({"prompt": "", "chosen": sides[0], "rejected": sides[1]})
    pairs = label_pairs(rows)
    people = measure([1.0] * len(pairs), pairs).people
    # The standard error of the mean is about 0.2 / sqrt(4000) = 0.003.
    assert people.mean == pytest.approx(people.by_chance, abs=0.01)


def test_a_record_is_plain_json():
    pairs = [pair(margin=1.0, category="x", votes=2, agreement=1.0), pair(margin=3.0), pair()]
    record = asdict(measure([1.0, 2.0, 0.0, 1.0], [*pairs, pair(tie=True)]))
    assert json.loads(json.dumps(record)) == record


def test_ratings_of_film_reviews_are_divided_at_one_two_three_four():
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is missing")
    pairs = label_pairs(read_rows(str(DATA / "test.jsonl"), "pairs"))
    result = measure([1.0] * len(pairs), pairs)
    counts = {name: rate.n for name, rate in result.by_margin.items()}
    assert counts == {"> 1": 998, "> 2": 749, "> 3": 538, "> 4": 241}
