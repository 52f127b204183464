"""The same year with other users: how often the feedback alone withdraws a champion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise
from random import Random

import numpy as np

from human_feedback.opinions import Opinion
from human_feedback.withdraw_champion import ALPHA, compare_feedback
from tests.benchmarks.year_results import Week

YEARS = 10

LOST = 0.1
"""How much smaller the share of liked answers of a worse champion is."""

ENOUGH = 200
"""Judgments within which a worse champion should be withdrawn."""

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Users:
    """Users who judge the champion's answers each week."""

    count: int
    thumbs: int
    """Number of users who judge an answer in a week."""

    liked: Mapping[str, Sequence[float]]
    """Version -> share of its answers that users like, for each topic."""

    def rate(self, version: str, week: Week) -> float:
        """Return the share of a version's answers that users would like in a week."""
        return float(np.dot(week.shares, self.liked[version]))


def print_withdrawals(weeks: Sequence[Week], users: Users) -> None:
    """Print how many champions are withdrawn in `YEARS` years with other users each."""
    tenures = [list(served) for _, served in groupby(weeks, lambda week: week.champion)]
    changes = list(pairwise(tenures))
    lots = Random("thumbs")
    withdrawn = [
        is_withdrawn_wrongly(lots, *change, users) for _ in range(YEARS) for change in changes
    ]
    print(
        f"{YEARS} years with the same champions and other users: {sum(withdrawn)} of "
        f"{len(withdrawn)} champions withdrawn in a week in which users like them as much as the "
        f"champion before (alpha {ALPHA:g})."
    )
    needed = [
        judgments_until_withdrawn(lots, *change, users) for _ in range(YEARS) for change in changes
    ]
    found = [count for count in needed if count]
    soon = sum(count <= ENOUGH for count in found)
    print(
        f"If users like each new champion {100 * LOST:.0f} points less than the one before it, "
        f"{len(found)} of {len(needed)} are withdrawn before the next promotion, {soon} of them "
        f"within {ENOUGH} judgments. Of those withdrawn, the median is "
        f"{np.median(found) if found else 0:.0f} judgments."
    )


def is_withdrawn_wrongly(
    lots: Random, before: Sequence[Week], after: Sequence[Week], users: Users
) -> bool:
    """Return whether a champion is withdrawn while users like it as much as the one before it."""
    old, new = before[0].champion, after[0].champion
    opinions = judgments(lots, before, users, old)
    for week in after:
        opinions += judgments(lots, [week], users, new)
        if users.rate(new, week) >= users.rate(old, week) and is_withdrawn(opinions, new, old):
            return True
    return False


def judgments_until_withdrawn(
    lots: Random, before: Sequence[Week], after: Sequence[Week], users: Users
) -> int:
    """Return how many judgments withdraw a champion that is worse by `LOST`; 0 if all do not."""
    old = before[0].champion
    earlier = judgments(lots, before, users, old)
    later = judgments(lots, after, users, old, "worse", LOST)
    for count in range(10, len(later) + 1, 10):
        if is_withdrawn([*earlier, *later[:count]], "worse", old):
            return count
    return 0


def judgments(
    lots: Random,
    weeks: Sequence[Week],
    users: Users,
    version: str,
    name: str = "",
    lost: float = 0.0,
) -> list[Opinion]:
    """Return the judgments on a version in some weeks; with `name`, of one that is worse."""
    return [
        opinion(
            user, name or version, week, minute, lots.random() < users.rate(version, week) - lost
        )
        for week in weeks
        for minute, user in enumerate(lots.sample(range(users.count), users.thumbs))
    ]


def is_withdrawn(opinions: Sequence[Opinion], new: str, old: str) -> bool:
    """Return whether the feedback shows that a champion is liked less."""
    since = min(one.time for one in opinions if one.version == new and one.time)
    before = since - timedelta(minutes=1)
    return compare_feedback(opinions, new, old, since=before).evidence >= 1 / ALPHA


def opinion(user: int, version: str, week: Week, minute: int, liked: bool) -> Opinion:
    return Opinion(
        prompt="",
        liked="answer" if liked else None,
        disliked=None if liked else "answer",
        user=f"user {user}",
        version=version,
        time=BEGIN + timedelta(weeks=week.number, minutes=minute),
        source="simulated",
    )
