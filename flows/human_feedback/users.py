"""Find users whose judgments are implausible beside those of the other users."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from scipy.stats import binomtest, fisher_exact

from human_feedback.opinions import Opinion
from human_feedback.same_answers import AnswerKey, answer_key

FALSE_ALARMS = 0.05
"""Largest probability of naming any user if all users judge alike, shared by all tests."""

_Votes: TypeAlias = Mapping[str, Mapping[AnswerKey, bool]]
"""User -> answer -> whether the user likes the answer."""


@dataclass(frozen=True)
class ImplausibleUser:
    """A user to look at."""

    user: str
    reason: str


def find_implausible(opinions: Sequence[Opinion]) -> list[ImplausibleUser]:
    """Return the users whose judgments of single answers differ from those of the other users.

    Two tests are made for each user: whether the user likes as large a share of answers as the
    others (Fisher's exact test); and whether, on answers that others judged as well, the user
    agrees with the majority of the others at least as often as by chance (binomial test). The user
    with the smallest p-value is named first, and does not count for the others. Users without an id
    are not named.
    """
    votes: dict[str, dict[AnswerKey, bool]] = defaultdict(dict)
    for one in opinions:
        if not one.is_pair:
            votes[one.user][answer_key(one)] = one.liked is not None
    level = FALSE_ALARMS / max(1, 2 * len(votes))
    found = []
    while tests := [test for user in votes if user for test in _tests(user, votes)]:
        least, user, reason = min(tests)
        if least >= level:
            break
        found.append(ImplausibleUser(user, reason))
        del votes[user]
    return found


def _tests(user: str, votes: _Votes) -> list[tuple[float, str, str]]:
    """Return the p-value of each test of a user, the user, and the reason to look at the user."""
    own, others = votes[user], [given for name, given in votes.items() if name != user]
    theirs = [liked for given in others for liked in given.values()]
    if not theirs:
        return []
    positive, others_positive = sum(own.values()), sum(theirs)
    counts = [
        [positive, len(own) - positive],
        [others_positive, len(theirs) - others_positive],
    ]
    tests = [
        (
            float(fisher_exact(counts).pvalue),
            user,
            f"likes {positive} of {len(own)} answers, and the other users like "
            f"{others_positive / len(theirs):.0%}",
        )
    ]
    majority = {
        answer: sum(1 if given[answer] else -1 for given in others if answer in given)
        for answer in own
    }
    compared = [answer for answer, sum_ in majority.items() if sum_]
    if compared:
        agreed = sum(own[answer] == (majority[answer] > 0) for answer in compared)
        tests.append(
            (
                float(binomtest(agreed, len(compared), 0.5, alternative="less").pvalue),
                user,
                f"agrees with the other users on {agreed} of {len(compared)} answers that they "
                "judged as well",
            )
        )
    return tests
