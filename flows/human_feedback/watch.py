"""Compare the feedback on the champion with the feedback on the champion before it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from human_feedback.opinions import Opinion
from human_feedback.read_traces import Scale, read_traces
from pipeline.evaluation.sequential.betting import log_capitals
from pipeline.registry.change_champion import read_champions, roll_back

ALPHA = 0.01
"""Largest probability of withdrawing a champion that users like as much as the one before it."""

PLANNED = 250
"""Number of judgments of the champion for which the judgments of the one before it must suffice."""

MOST_COMPARED = 5
"""Maximum number of earlier judgments that one judgment of the champion is compared with."""


@dataclass(frozen=True, kw_only=True)
class FeedbackComparison:
    """Judgments of single answers of the champion and of the champion before it."""

    champion: int
    """Version of the champion."""

    before: int
    """Version of the champion before it."""

    liked: tuple[int, int]
    """Number of positive judgments on the champion, and on the one before it."""

    judged: tuple[int, int]
    """Number of judgments on the champion, and on the one before it."""

    evidence: float
    """Capital of bets that users like the champion less; 1 / alpha shows it."""

    def describe(self) -> str:
        """Return the rates and the evidence as a sentence."""
        parts = [
            f"version {version}: {liked} of {judged} answers liked"
            for version, liked, judged in zip(
                (self.champion, self.before), self.liked, self.judged, strict=True
            )
        ]
        return f"{parts[0]}; {parts[1]}; evidence that it is worse {self.evidence:.3g} : 1"


def compare_feedback(
    opinions: Sequence[Opinion], champion: int, before: int, margin: float = 0.0
) -> FeedbackComparison:
    """Compare the judgments of single answers; pairs and corrections do not count.

    `margin` is the loss in the share of liked answers that is accepted.
    """
    new, old = (_judgments(opinions, version) for version in (champion, before))
    return FeedbackComparison(
        champion=champion,
        before=before,
        liked=(sum(new), sum(old)),
        judged=(len(new), len(old)),
        # The newest judgments of the version before are closest in time.
        evidence=evidence_of_loss(new, old[::-1], margin),
    )


def watch_champion(
    name: str, *, by: str, alpha: float = ALPHA, margin: float = 0.0, withdraw: bool
) -> str:
    """Compare the feedback on the champion with that on the one before, and return the result.

    If the champion is shown to be worse and `withdraw` is true, the one before is champion again.

    Raises:
        DataError: no served answers are recorded.
        ModelError: MLflow does not answer, or somebody else decided meanwhile.
    """
    champions = read_champions(name)
    if champions.champion is None or champions.previous is None:
        return f"'{name}' has no two champions to compare."
    opinions = read_traces(name, Scale()).opinions
    found = compare_feedback(opinions, champions.champion, champions.previous, margin)
    told = found.describe()
    if found.evidence < 1 / alpha:
        return f"{told}, of {1 / alpha:.3g} : 1 needed. The champion stays."
    if not withdraw:
        return f"{told}, which suffices (alpha {alpha:g}). --withdraw withdraws the champion."
    decision = roll_back(name, reason=f"Users like it less: {told}.", by=by)
    return f"{told}. Version {decision.champion} is champion again."


def evidence_of_loss(new: Sequence[bool], old: Sequence[bool], margin: float = 0.0) -> float:
    """Return the largest capital of bets that new answers are liked less than old ones.

    Judgment i of the champion, x_i, is compared with the mean m_i of k other judgments of the
    version before. A bet wins if m_i - x_i is above `margin` (see `log_capitals`). If the
    champion is liked as much, the capital ever reaches 1 / alpha with a probability of at most
    alpha (Ville's inequality), however often one looks. k depends on the number of old judgments
    alone, so no old judgment is used twice; when all are used, no further bet is made.
    """
    compared = min(max(len(old) // PLANNED, 1), MOST_COMPARED)
    bets = min(len(new), len(old) // compared)
    if not bets:
        return 1.0
    means = np.reshape(old[: bets * compared], (bets, compared)).mean(axis=1)
    losses = means - np.asarray(new[:bets], dtype=float)
    return math.exp(log_capitals(losses, margin, -1.0).max())


def _judgments(opinions: Sequence[Opinion], version: int) -> list[bool]:
    """Return whether each judgment of a version is positive, oldest first."""
    own = [one for one in opinions if one.version == str(version) and not one.is_pair]
    own.sort(key=lambda one: one.time.timestamp() if one.time else 0.0)
    return [one.liked is not None for one in own]
