"""Several judges that vote: majorities by hand, and what an ensemble keeps of them."""

from itertools import permutations, product

import pytest

from pipeline.judges.function_judge import FunctionJudge
from pipeline.judges.make_judge import Ensemble, count_votes
from pipeline.judges.verdict import WINNERS, Verdict, swapped

LETTERS = {"f": "first", "s": "second", "t": "tie", "i": "invalid"}


def cast(letters: str) -> tuple[Verdict, ...]:
    return tuple(Verdict(LETTERS[letter]) for letter in letters)


def always(winner: str, *, version: str = "1") -> FunctionJudge:
    return FunctionJudge(f"always {winner}", lambda prompts, pairs: [winner] * len(pairs), version)


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        ("fff", "first"),
        ("ffs", "first"),  # 2 of 3
        ("ssf", "second"),
        ("fst", "tie"),  # nobody has more than 1.5
        ("ftt", "tie"),
        ("fs", "tie"),
        ("ft", "tie"),  # exactly half is not more than half
        ("sfff", "first"),
        ("ffss", "tie"),
        ("fft", "first"),
        ("ffst", "tie"),  # 2 of 4
        ("fi", "first"),  # 1 of 1 valid; half of all votes are invalid, not more
        ("ffi", "first"),
        ("fsi", "tie"),
        ("fii", "invalid"),  # 2 of 3 are invalid
        ("ffii", "first"),
        ("fiii", "invalid"),
        ("i", "invalid"),
        ("ii", "invalid"),
        ("fffii", "first"),
        ("ffsii", "first"),  # 2 of 3 valid
        ("ffiii", "invalid"),
    ],
)
def test_majorities_done_by_hand(votes: str, winner: str):
    assert count_votes(cast(votes)).winner == winner
    for order in set(permutations(votes)):
        assert count_votes(cast("".join(order))).winner == winner


def test_swapping_every_vote_swaps_the_verdict():
    for winners in product(WINNERS, repeat=3):
        votes = tuple(Verdict(winner, 0.75) for winner in winners)
        assert count_votes(tuple(map(swapped, votes))).winner == swapped(count_votes(votes)).winner


def test_the_probability_is_the_mean_of_those_that_are_known():
    votes = [Verdict("first", 0.9), Verdict("second"), Verdict("first", 0.6)]
    assert count_votes(votes).probability == pytest.approx(0.75)
    assert count_votes(cast("fs")).probability is None


def test_an_invalid_vote_has_no_probability_that_counts():
    votes = [Verdict("first", 0.75), Verdict("first"), Verdict("invalid", 0.25)]
    assert count_votes(votes).probability == 0.75
    none = count_votes([Verdict("first", 0.75), Verdict("invalid"), Verdict("invalid")])
    assert none.probability is None


def test_too_few_votes_are_explained():
    assert count_votes(cast("fii")).reason == "2 of 3 judges gave no verdict."
    assert count_votes(cast("ffi")).reason == ""


def test_an_ensemble_keeps_its_members_and_their_votes_in_order():
    ensemble = Ensemble([always("first"), always("invalid"), always("tie")])
    assert ensemble.members == ("always first", "always invalid", "always tie")
    assert ensemble.name == "majority of always first; always invalid; always tie"
    verdicts = ensemble(["p", "q"], [("a", "b"), ("c", "d")])
    assert verdicts == [Verdict("tie", votes=cast("fit"))] * 2


def test_every_member_sees_every_pair_in_its_place():
    def shorter(prompts, pairs):
        return ["first" if len(a) < len(b) else "second" for a, b in pairs]

    def as_the_prompt_says(prompts, pairs):
        return prompts

    ensemble = Ensemble(
        [FunctionJudge("shorter", shorter, "1"), FunctionJudge("told", as_the_prompt_says, "1")]
    )
    verdicts = ensemble(["first", "second", "second"], [("a", "bb"), ("a", "bb"), ("aa", "b")])
    assert [verdict.winner for verdict in verdicts] == ["first", "tie", "second"]
    assert [verdict.votes for verdict in verdicts] == [cast("ff"), cast("fs"), cast("ss")]


def test_the_version_follows_every_member():
    one = Ensemble([always("first"), always("tie")]).version
    assert one == Ensemble([always("first"), always("tie")]).version
    assert one != Ensemble([always("first"), always("tie", version="2")]).version
    assert one != Ensemble([always("first"), always("second")]).version
