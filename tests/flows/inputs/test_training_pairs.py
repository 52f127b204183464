from math import log

import pytest

from pipeline.inputs.training_pairs import (
    held_out_pairs,
    join_by_weight,
    split_off_judge_pairs,
    training_pairs_of,
)
from pipeline.inputs.user_feedback_to_pairs import pairs_of_feedback
from ppo_core.data.rows.split_rows import held_out
from ppo_core.errors import DataError
from tests.helpers.inputs.rows import plain, rows_of


def vote(chosen: str, rejected: str, **labels) -> dict:
    return {"prompt": "p", "chosen": chosen, "rejected": rejected, **labels}


def test_a_reward_model_is_trained_on_texts_alone_and_on_no_ties():
    kept = [vote("a", "b"), vote("c", "d")]
    rows = rows_of(
        "pairs",
        [
            {**vote("a", "b"), "margin": 2.0},
            vote("x", "y", tie=True),
            vote("z", "z"),
            *kept[1:],
        ],
    )
    others = rows_of("pairs", [vote("e", "f")])
    trained = training_pairs_of(rows, others)
    assert plain(trained) == kept
    assert trained.source == "the rows, less 2 that are ties or held out"
    assert trained.digest == training_pairs_of(rows_of("pairs", kept), others).digest
    assert trained.digest != rows.digest


def test_pairs_of_the_validation_set_are_not_trained_on_in_either_order():
    rows = rows_of("pairs", [vote("a", "b"), vote("c", "d")])
    trained = training_pairs_of(rows, rows_of("pairs", [vote("d", "c")]))
    assert plain(trained) == [vote("a", "b")]


def test_no_prompt_has_both_held_out_and_training_pairs():
    # The prompt a has 3 of 10 pairs, one of them the last: too many for a fifth.
    prompts = list("abacdefgha")
    pairs = [{"prompt": p, "chosen": f"{n}", "rejected": "x"} for n, p in enumerate(prompts)]
    rows = rows_of("pairs", pairs)
    kept, split_off = held_out_pairs(rows, 0.2)
    assert split_off.column("prompt") == ["g", "h"]
    assert kept.column("prompt") == list("abacdefa")
    assert len({rows.digest, kept.digest, split_off.digest}) == 3
    # More pairs of the first prompt hold no pair out that may have trained a model.
    later = rows_of("pairs", [*pairs, *({**pairs[0], "chosen": f"later {n}"} for n in range(5))])
    kept, split_off = held_out_pairs(later, 0.2)
    assert split_off.column("prompt") == ["f", "g", "h"]
    assert kept.column("prompt").count("a") == 8
    # Nothing fits: the smallest prompt is split off.
    few = rows_of("pairs", [pairs[0], pairs[1], pairs[2], {**pairs[1], "chosen": "9"}, pairs[9]])
    assert held_out_pairs(few, 0.2)[1].column("prompt") == ["b", "b"]


def test_pairs_in_order_of_their_prompts_are_held_out_as_before():
    pairs = [{"prompt": p, "chosen": "y", "rejected": "x"} for p in "aabbccddee"]
    rows = rows_of("pairs", pairs)
    assert [part.digest for part in held_out_pairs(rows, 0.2)] == [
        part.digest for part in held_out(rows, 0.2)
    ]
    bare = rows_of("pairs", [{"prompt": "", "chosen": f"{n}", "rejected": "x"} for n in range(10)])
    assert len(held_out_pairs(bare, 0.2)[1]) == 2


def test_the_judge_gets_every_third_different_pair():
    # The pairs are numbered by their first rows: ab 0, cd 1, ef 2, gh 3, ij 4, kl 5.
    votes = "ab cd ba ef gh fe ij kl ef lk".split()
    rows = rows_of("pairs", [vote(*pair) for pair in votes])
    trained, judged = split_off_judge_pairs(rows)
    assert plain(trained) == [vote(*pair) for pair in "ab cd ba gh ij".split()]
    assert plain(judged) == [vote(*pair) for pair in "ef fe kl ef lk".split()]
    again = split_off_judge_pairs(rows)
    assert [part.digest for part in again] == [trained.digest, judged.digest]


def test_two_different_pairs_are_too_few_to_split():
    rows = rows_of("pairs", [vote("a", "b"), vote("b", "a"), vote("c", "d")])
    with pytest.raises(DataError, match="3 training rows contain fewer than 3 different pairs"):
        split_off_judge_pairs(rows)


def test_pairs_of_two_data_sets_have_the_weights_of_their_data_sets():
    fresh = rows_of("pairs", [{"prompt": "w0", "chosen": "w1", "rejected": "w2", "margin": 2}])
    given = rows_of("pairs", [{"prompt": "w3", "chosen": "w4", "rejected": "w5"}])
    together = join_by_weight([(fresh, 1.0), (given, 0.25)])
    assert plain(together) == [
        {"prompt": "w0", "chosen": "w1", "rejected": "w2", "margin": 0.0, "weight": 1.0},
        {"prompt": "w3", "chosen": "w4", "rejected": "w5", "margin": 0.0, "weight": 0.25},
    ]
    assert join_by_weight([(fresh, 1.0)]) is fresh
    digests = {join_by_weight([(fresh, 1.0), (given, each)]).digest for each in (0.25, 0.5)}
    assert len(digests | {fresh.digest, given.digest}) == 4


def test_a_judgment_is_a_pair_with_a_missing_response_and_the_log_odds_of_all_judgments():
    rows = [
        {"prompt": "w0", "chosen": "w1", "rejected": None},
        {"prompt": "w0", "chosen": None, "rejected": "w2", "weight": 0.5},
        {"prompt": "w0", "chosen": "w3", "rejected": None, "weight": 2},
        {"prompt": "w0", "chosen": "w4", "rejected": "w5"},
        {"prompt": "w6", "chosen": "w7", "rejected": "w8"},
    ]
    held_out = rows_of("pairs", [{"prompt": "w6", "chosen": "w8", "rejected": "w7"}])
    pairs = plain(pairs_of_feedback(rows_of("feedback", rows), [held_out]))
    # Weight 3 is liked and 0.5 disliked. The pair of w6 is held out.
    assert [pair["margin"] for pair in pairs] == [-log(6), log(6), -log(6), 0.0]
    assert [pair["weight"] for pair in pairs] == [1.0, 0.5, 2.0, 1.0]
    only_liked = pairs_of_feedback(rows_of("feedback", rows[:1]), [held_out])
    assert plain(only_liked)[0]["margin"] == 0.0


def test_feedback_keeps_its_margin_and_its_weight_beside_given_pairs():
    held_out = rows_of("pairs", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    given = rows_of("pairs", [{"prompt": "w0", "chosen": "w1", "rejected": "w2", "margin": 2}])
    rows = [
        {"prompt": "w3", "chosen": "w4", "weight": 0.5},
        {"prompt": "w3", "rejected": "w5", "weight": 0.25},
    ]
    feedback = pairs_of_feedback(rows_of("feedback", rows), [held_out])
    assert plain(join_by_weight([(given, 1.0), (feedback, 2.0)])) == [
        {"prompt": "w0", "chosen": "w1", "rejected": "w2", "margin": 0.0, "weight": 1.0},
        {"prompt": "w3", "chosen": "w4", "margin": -log(2), "weight": 1.0},
        {"prompt": "w3", "rejected": "w5", "margin": log(2), "weight": 0.5},
    ]
