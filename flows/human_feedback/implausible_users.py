"""Find users whose judgments are implausible, compared with the judgments of the other users."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from scipy.stats import binomtest, fisher_exact

from human_feedback.opinions import Opinion
from human_feedback.same_answers import AnswerKey, answer_key

FALSE_ALARMS = 0.05
"""Maximum probability that at least one user is named although all users judge alike."""

_Votes: TypeAlias = Mapping[AnswerKey, bool]
"""Answer -> whether a user likes the answer."""


@dataclass(frozen=True)
class ImplausibleUser:
    """A user whose judgments look implausible, and the reason."""

    user: str
    reason: str


class _Totals:
    """Totals over all users, from which each user's own judgments are subtracted."""

    def __init__(self) -> None:
        self.judgments = self.positive = 0
        self.margins: Counter[AnswerKey] = Counter()
        """Answer -> number of users who like it, minus number of users who dislike it."""

    def add(self, votes: _Votes, sign: int = 1) -> None:
        """Add the judgments of a user; with the sign -1, remove them."""
        self.judgments += sign * len(votes)
        self.positive += sign * sum(votes.values())
        for answer, liked in votes.items():
            self.margins[answer] += sign if liked else -sign


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
    totals, found = _Totals(), []
    for own in votes.values():
        totals.add(own)
    while tests := [
        test for user, own in votes.items() if user for test in _tests(user, own, totals)
    ]:
        least, user, reason = min(tests)
        if least >= level:
            break
        found.append(ImplausibleUser(user, reason))
        totals.add(votes.pop(user), sign=-1)
    return found


def _tests(user: str, own: _Votes, totals: _Totals) -> list[tuple[float, str, str]]:
    """Return (p-value, user, reason) for each test of a user."""
    positive, theirs = sum(own.values()), totals.judgments - len(own)
    if not theirs:
        return []
    others_positive = totals.positive - positive
    tests = [
        (
            _fisher(positive, len(own) - positive, others_positive, theirs - others_positive),
            user,
            f"likes {positive} of {len(own)} answers, and the other users like "
            f"{others_positive / theirs:.0%}",
        )
    ]
    majority = {
        answer: totals.margins[answer] - (1 if liked else -1) for answer, liked in own.items()
    }
    compared = [answer for answer, sum_ in majority.items() if sum_]
    if compared:
        agreed = sum(own[answer] == (majority[answer] > 0) for answer in compared)
        tests.append(
            (
                _binomial(agreed, len(compared)),
                user,
                f"agrees with the other users on {agreed} of {len(compared)} answers that they "
                "judged as well",
            )
        )
    return tests


# Cached, because many users have equal counts, and a test takes much longer than the counting.
@lru_cache(maxsize=10_000)
def _fisher(positive: int, negative: int, others_positive: int, others_negative: int) -> float:
    counts = [[positive, negative], [others_positive, others_negative]]
    return float(fisher_exact(counts).pvalue)


@lru_cache(maxsize=10_000)
def _binomial(agreed: int, compared: int) -> float:
    return float(binomtest(agreed, compared, 0.5, alternative="less").pvalue)
