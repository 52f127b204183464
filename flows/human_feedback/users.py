"""Find users whose judgments are implausible, compared with the judgments of the other users."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from scipy.stats import binomtest, fisher_exact

from human_feedback.opinions import Opinion
from human_feedback.same_answers import AnswerKey, answer_key

FALSE_ALARMS = 0.05
"""Maximum probability that the tests together name any user although all users judge alike."""

_Votes: TypeAlias = Mapping[str, Mapping[AnswerKey, bool]]
"""User -> answer -> whether the user likes the answer."""


@dataclass(frozen=True)
class ImplausibleUser:
    """A user whose judgments look implausible, and the reason."""

    user: str
    reason: str


def find_implausible(opinions: Sequence[Opinion]) -> list[ImplausibleUser]:
    """Return the users whose judgments of single answers differ from the other users' judgments.

    Each user is tested twice. Fisher's exact test compares the share of answers that the user likes
    with the share that the other users like. The binomial test takes the answers that other users
    judged as well, and asks whether the user agrees with their majority less often than by chance.
    The user with the smallest p-value is named first, and this user's judgments are removed before
    the next user is named. Users without an id are not named.
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
    """Return (p-value, user, reason) for each test of a user."""
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
