from itertools import permutations

import pytest

from pipeline.inputs.human_labels_to_pairs import pairs_of_votes
from pipeline.inputs.labeled_pairs import LabeledPair, label_pairs
from tests.helpers.inputs.rows import rows_of


def vote(chosen: str, rejected: str, **labels) -> dict:
    return {"prompt": "p", "chosen": chosen, "rejected": rejected, **labels}


def test_a_row_of_its_own_keeps_what_it_says():
    row = vote("a", "b", margin=2, category="news", source="web", tie=False, annotator=3)
    assert label_pairs([row]) == [
        LabeledPair(prompt="p", chosen="a", rejected="b", margin=2.0, category="news")
    ]


def test_rows_need_no_label():
    nothing = vote("a", "b", margin=None, category=None, tie=None, annotator=None)
    assert label_pairs([nothing]) == [LabeledPair(prompt="p", chosen="a", rejected="b")]


def test_the_source_is_the_category_where_there_is_no_other():
    assert label_pairs([vote("a", "b", category=None, source="web")])[0].category == "web"


def test_the_majority_decides_in_whatever_order_the_votes_stand():
    # Two for a, one for b: 2/3 agree. Margins for a: 1, -3 (3 for b), 0.5; their mean is -0.5.
    votes = [vote("a", "b", margin=1), vote("b", "a", margin=3), vote("a", "b", margin=0.5)]
    for order in permutations(votes):
        assert label_pairs(order) == [
            LabeledPair(
                prompt="p",
                chosen="a",
                rejected="b",
                margin=pytest.approx(-0.5),
                votes=3,
                agreement=pytest.approx(2 / 3),
            )
        ]


def test_margins_are_averaged_over_the_rows_that_have_one():
    pairs = label_pairs([vote("a", "b", margin=4), vote("a", "b"), vote("a", "b", margin=None)])
    assert pairs[0].margin == 4
    # A margin of 0 is one.
    assert label_pairs([vote("a", "b", margin=4), vote("a", "b", margin=0)])[0].margin == 2


def test_an_even_split_is_a_tie_in_the_order_of_its_first_row():
    (pair,) = label_pairs([vote("b", "a", margin=3), vote("a", "b", margin=1)])
    assert (pair.tie, pair.chosen, pair.rejected) == (True, "b", "a")
    assert (pair.margin, pair.votes, pair.agreement) == (1, 2, 0.5)


@pytest.mark.parametrize(
    ("a", "b", "neither", "tie", "agreement"),
    [
        (1, 0, 1, True, 1 / 2),
        (2, 0, 1, False, 2 / 3),
        (2, 1, 2, True, 2 / 5),
        (2, 1, 3, True, 3 / 6),
        (2, 2, 1, True, 2 / 5),
        (3, 1, 2, False, 3 / 6),
        (0, 0, 2, True, 1),
    ],
)
def test_votes_for_neither_are_an_opinion_too(a, b, neither, tie, agreement):
    votes = [vote("a", "b")] * a + [vote("b", "a")] * b + [vote("a", "b", tie=True)] * neither
    (pair,) = label_pairs(votes)
    assert pair.tie == tie
    assert pair.chosen == "a"
    assert pair.agreement == pytest.approx(agreement)


def test_a_single_vote_for_neither_is_a_tie():
    (pair,) = label_pairs([vote("a", "b", tie=True)])
    assert pair.tie
    assert pair.agreement is None


def test_twice_the_same_text_is_a_tie():
    one, several = label_pairs([vote("a", "a"), vote("b", "b"), vote("b", "b")])
    assert one.tie
    assert several.tie
    assert several.votes == 2


def test_a_person_has_one_vote():
    # Ann says it twice and Bob the opposite once: an even split. Eve contradicts herself.
    ann, bob = vote("a", "b", annotator="ann"), vote("b", "a", annotator="bob")
    (pair,) = label_pairs([ann, ann, bob])
    assert (pair.tie, pair.votes, pair.agreement) == (True, 2, 0.5)
    eve = [vote("a", "b", annotator="eve"), vote("b", "a", annotator="eve")]
    (pair,) = label_pairs([*eve, ann])
    assert (pair.tie, pair.votes) == (True, 2)


def test_other_prompts_and_other_texts_are_other_pairs():
    rows = [vote("a", "b"), {**vote("a", "b"), "prompt": "q"}, vote("a", "c"), vote("b", "a")]
    pairs = label_pairs(rows)
    assert [(pair.prompt, pair.rejected, pair.votes) for pair in pairs] == [
        ("p", "b", 2),
        ("q", "b", 1),
        ("p", "c", 1),
    ]


def test_pairs_of_equal_messages_are_one_pair():
    asked = [{"role": "user", "content": "p"}]
    rows = [{**vote("a", "b"), "prompt": asked}, {**vote("b", "a"), "prompt": asked}]
    (pair,) = label_pairs(rows_of("pairs", rows, is_chat=True))
    assert (pair.prompt, pair.votes, pair.tie) == (asked, 2, True)


def test_the_votes_of_several_people_on_a_pair_are_counted_once_per_person():
    given = [("ann", "first"), ("eve", "second"), ("eve", "second"), ("bob", "first")]
    votes = [
        {"prompt": "p", "first": "a", "second": "b", "label": label, "annotator": annotator}
        for annotator, label in given
    ]
    (pair,) = label_pairs(pairs_of_votes(rows_of("votes", votes)))
    assert (pair.chosen, pair.votes, pair.tie) == ("a", 3, False)
    unknown = [{**vote, "annotator": None} for vote in votes]
    (pair,) = label_pairs(pairs_of_votes(rows_of("votes", unknown)))
    assert (pair.votes, pair.tie) == (4, True)
