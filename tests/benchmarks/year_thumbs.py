"""The same year with other users: how often the feedback alone withdraws a champion."""

from collections.abc import Callable, Mapping, Sequence
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

LOOKS = 10
"""Judgments between two looks at the evidence."""

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


@dataclass(frozen=True)
class Change:
    """Two champions, one after the other."""

    old: str
    before: Sequence[Week]
    """The weeks in which users saw the old champion."""

    new: str
    after: Sequence[Week]
    """The weeks in which users saw the new one."""


def changes_of(weeks: Sequence[Week]) -> list[Change]:
    """Return the changes of the champion that users saw: the one at the end of the week before."""
    seen = [(one.champion, two) for one, two in pairwise(weeks) if one.champion]
    tenures = [
        (version, [week for _, week in served]) for version, served in groupby(seen, lambda x: x[0])
    ]
    return [Change(*one, *two) for one, two in pairwise(tenures)]


def print_withdrawals(weeks: Sequence[Week], users: Users) -> None:
    """Print how many champions are withdrawn in `YEARS` years with other users each."""
    changes, lots = changes_of(weeks), Random("thumbs")
    wrong = [is_withdrawn_wrongly(lots, one, users) for _ in range(YEARS) for one in changes]
    print(
        f"{YEARS} years with the same champions and other users: {sum(wrong)} of {len(wrong)} new "
        f"champions withdrawn in a week in which users like them as much as the one before (alpha "
        f"{ALPHA:g})."
    )
    for lost in (0.0, LOST):
        needed = [
            judgments_until_withdrawn(lots, one, users, lost)
            for _ in range(YEARS)
            for one in changes
        ]
        found = [count for count in needed if count]
        soon = sum(count <= ENOUGH for count in found)
        print(
            f"If users like each new champion {100 * lost:.0f} points less than they would like "
            f"the one before it in the same week, {len(found)} of {len(needed)} are withdrawn "
            f"before the next change, {soon} of them within {ENOUGH} judgments."
        )


def is_withdrawn_wrongly(lots: Random, change: Change, users: Users) -> bool:
    """Return whether a champion is withdrawn in a week in which it is as good as the old one."""
    count = _until_withdrawn(lots, change, users, lambda week: users.rate(change.new, week))
    if not count:
        return False
    week = change.after[(count - 1) // users.thumbs]
    return users.rate(change.new, week) >= users.rate(change.old, week)


def judgments_until_withdrawn(lots: Random, change: Change, users: Users, lost: float) -> int:
    """Return how many judgments withdraw a champion that is worse by `lost`; 0 if all do not."""
    return _until_withdrawn(
        lots, change, users, lambda week: max(users.rate(change.old, week) - lost, 0.0)
    )


def _until_withdrawn(
    lots: Random, change: Change, users: Users, rate: Callable[[Week], float]
) -> int:
    """Return how many judgments withdraw a champion that users like at a rate; 0 if all do not."""
    old, new = 1, 2
    earlier = _judgments(lots, change.before, users, old, lambda week: users.rate(change.old, week))
    later = _judgments(lots, change.after, users, new, rate)
    promoted = BEGIN + timedelta(weeks=change.after[0].number, minutes=-1)
    for count in range(LOOKS, len(later) + 1, LOOKS):
        opinions = [*earlier, *later[:count]]
        found = compare_feedback(opinions, new, old, since=promoted)
        if found.evidence >= 1 / ALPHA:
            return count
    return 0


def _judgments(
    lots: Random,
    weeks: Sequence[Week],
    users: Users,
    version: int,
    rate: Callable[[Week], float],
) -> list[Opinion]:
    """Return the judgments of some weeks, in their order in time."""
    return [
        _opinion(user, version, week, minute, lots.random() < rate(week))
        for week in weeks
        for minute, user in enumerate(lots.sample(range(users.count), users.thumbs))
    ]


def _opinion(user: int, version: int, week: Week, minute: int, liked: bool) -> Opinion:
    return Opinion(
        prompt="",
        liked="answer" if liked else None,
        disliked=None if liked else "answer",
        user=f"user {user}",
        version=str(version),
        time=BEGIN + timedelta(weeks=week.number, minutes=minute),
        source="simulated",
    )
