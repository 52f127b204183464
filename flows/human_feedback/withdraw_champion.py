"""Compare the feedback on the champion with the feedback on the previous champion."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean

import numpy as np

from human_feedback.opinions import Opinion
from human_feedback.read_traces import Scale, read_traces
from pipeline.evaluation.confidence_interval import log_capitals
from pipeline.registry.aliases import CHAMPION, read_aliases
from pipeline.registry.change_champion import read_champions, roll_back
from pipeline.registry.decisions import Decision
from pipeline.registry.sync_aliases import sync_aliases

ALPHA = 0.01
"""Maximum probability of withdrawing a champion that users like as much as the previous one."""

PLANNED = 250
"""Number of comparisons for which the users of the previous champion should suffice. A comparison
takes one user of the champion, and k users of the previous champion: k is the number of these users
divided by PLANNED and rounded down, but at least 1 and at most MOST_COMPARED."""

MOST_COMPARED = 5
"""Maximum number of the previous champion's users in one comparison."""

LARGEST_LOG = 700.0
"""Maximum logarithm of the evidence; the exponential of a larger number overflows a float."""


@dataclass(frozen=True, kw_only=True)
class FeedbackComparison:
    """Judgments of single answers of the champion and the previous champion, one per user."""

    champion: int
    """Version of the champion."""

    before: int
    """Version of the previous champion."""

    liked: tuple[float, float]
    """Mean judgment of the users of the champion, and of the previous champion: 1 for liked."""

    users: tuple[int, int]
    """Number of users who judged the champion, and of users who judged the previous champion."""

    evidence: float
    """Largest capital of bets that users like the champion less. A capital of at least 1 / alpha
    shows that users like the champion less."""

    def describe(self) -> str:
        """Return the rates and the evidence as a sentence."""
        parts = [
            f"version {version}: {users} users like {rate:.0%} of the answers"
            for version, users, rate in zip(
                (self.champion, self.before), self.users, self.liked, strict=True
            )
        ]
        return (
            f"{parts[0]}; {parts[1]}; evidence that the champion is worse: {self.evidence:.3g} : 1"
        )


def watch_champion(
    name: str, *, by: str, alpha: float = ALPHA, margin: float = 0.0, withdraw: bool
) -> str:
    """Compare the feedback on the champion and the previous champion; describe the result.

    If the evidence shows that the champion is worse and `withdraw` is true, withdraw it, so that
    the previous champion is champion again. A champion that is older than the previous champion is
    not withdrawn: a person has put it back. If the alias was moved in MLflow, record the move
    first if `withdraw` is true; otherwise compare nothing.

    Raises:
        DataError: no served answers are recorded.
        ModelError: MLflow does not answer, or somebody else decided meanwhile.
    """
    aliases = read_aliases(name)
    if not aliases:
        return f"'{name}' has no two champions to compare."
    champions = sync_aliases(name) if withdraw else read_champions(name)
    champion, before = champions.champion, champions.previous
    if not withdraw and aliases.get(CHAMPION) != champion:
        return (
            f"The champions of '{name}' were not compared: by the alias, the champion is version "
            f"{aliases.get(CHAMPION, 'none')}; by the history, it is version {champion or 'none'}. "
            "Use --withdraw to record the move of the alias and to compare."
        )
    if champion is None or before is None:
        return f"'{name}' has no two champions to compare."
    opinions = [
        one
        for version in (champion, before)
        for one in read_traces(name, Scale(), version=str(version), replaced=True).opinions
    ]
    since = promoted_at(champions.decisions, champion)
    found = compare_feedback(opinions, champion, before, since=since, margin=margin)
    told = found.describe()
    if champion < before:
        return f"{told}. A person put version {champion} back, so it stays champion."
    if found.evidence < 1 / alpha:
        return f"{told}; needed: {1 / alpha:.3g} : 1. The champion stays."
    if not withdraw:
        return f"{told}; needed: {1 / alpha:.3g} : 1. --withdraw withdraws the champion."
    reason = f"Users like it less: {told}."
    decision = roll_back(name, reason=reason, by=by, champion=champion)
    return f"{told}. Version {decision.champion} is champion again."


def promoted_at(decisions: Sequence[Decision], champion: int) -> datetime:
    """Return the time of the last decision that made this version the champion."""
    made, earlier = "", None
    for one in decisions:
        if one.champion == champion and earlier != champion:
            made = one.at
        earlier = one.champion
    return datetime.fromisoformat(made)


def compare_feedback(
    opinions: Sequence[Opinion],
    champion: int,
    before: int,
    *,
    since: datetime,
    margin: float = 0.0,
) -> FeedbackComparison:
    """Compare the judgments of single answers; pairs and corrections do not count.

    Each user counts once, because judgments of one user are not independent. For the previous
    champion, a user's value is the mean of the user's judgments. For the champion, it is the user's
    first judgment, because later judgments would change a value on which bets were already made.
    A judgment that is edited or deleted in MLflow does change such a value. Judgments of users
    without an id do not count.

    Args:
        opinions: opinions on answers of both versions, also those that the user replaced later.
        champion: version of the champion.
        before: version of the previous champion.
        since: time of the champion's promotion. Only earlier judgments of the previous champion
            count, and only later judgments of the champion.
        margin: accepted loss in the share of liked answers.
    """
    new = [given[0] for given in _by_user(opinions, champion, after=since).values()]
    old = [fmean(given) for given in _by_user(opinions, before, until=since).values()]
    return FeedbackComparison(
        champion=champion,
        before=before,
        liked=(fmean(new) if new else 0.0, fmean(old) if old else 0.0),
        users=(len(new), len(old)),
        # Use the newest users of the previous champion first: they are closest in time.
        evidence=evidence_of_loss(new, old[::-1], margin),
    )


def evidence_of_loss(new: Sequence[float], old: Sequence[float], margin: float = 0.0) -> float:
    """Return the largest capital of bets that new answers are liked less than old ones.

    User i of the champion has the judgment x_i. The judgment is compared with the mean m_i of the
    judgments of k users of the previous champion. A bet wins if m_i - x_i is above `margin` (see
    `log_capitals`). If users like the champion as much as the previous champion, the probability
    that the capital ever reaches 1 / alpha is at most alpha (Ville's inequality), however often the
    evidence is checked. k depends only on M. Each user of the previous champion is compared only
    once, and the bets end when fewer than k of these users are left.

    Args:
        new: judgments (N,) of the champion, from 0 to 1, by independent users.
        old: judgments (M,) of the previous champion, from 0 to 1.
        margin: accepted loss in the share of liked answers.
    """
    compared = min(max(len(old) // PLANNED, 1), MOST_COMPARED)
    bets = min(len(new), len(old) // compared)
    if not bets:
        return 1.0
    means = np.reshape(old[: bets * compared], (bets, compared)).mean(axis=1)
    losses = means - np.asarray(new[:bets], dtype=float)
    return math.exp(min(log_capitals(losses, margin, -1.0).max(), LARGEST_LOG))


def _by_user(
    opinions: Sequence[Opinion],
    version: int,
    *,
    after: datetime | None = None,
    until: datetime | None = None,
) -> Mapping[str, list[float]]:
    """Return user -> judgments of a version, oldest first; users are sorted by first judgment."""
    own = [
        (one.time, one)
        for one in opinions
        if one.version == str(version) and not one.is_pair and one.user and one.time is not None
    ]
    found: dict[str, list[float]] = {}
    for time, one in sorted(own, key=lambda timed: timed[0]):
        if (after is None or time > after) and (until is None or time <= until):
            found.setdefault(one.user, []).append(float(one.liked is not None))
    return found
