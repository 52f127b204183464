"""The verdict of a judge on a pair of answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ppo_core.data.chat_template import Messages

JudgedPrompt: TypeAlias = str | Messages
"""Text, or messages of a chat. A judge reads messages as the text that `shown_prompt` returns, or
renders them with the judge's own chat template."""

WINNERS = ("first", "second", "tie", "invalid")


@dataclass(frozen=True)
class Verdict:
    """A judge's decision about which of two answers to a prompt is better."""

    winner: str
    """`first`, `second`, `tie`, or `invalid` if the judge gave no readable verdict."""

    probability: float | None = None
    """Probability that the first answer is better; None if the judge gives no probability."""

    reason: str = ""
    """The judge's reason, or the reason why the verdict is invalid."""

    votes: tuple["Verdict", ...] = ()
    """Verdicts of an ensemble's judges, in the order of `Judge.members`; empty for one judge."""


class Judge(Protocol):
    """Compares the two answers of each pair."""

    @property
    def name(self) -> str:
        """Name of the judge in reports: the model, and the version of its prompt if it has one."""
        ...

    @property
    def version(self) -> str:
        """Digest of everything known that determines the verdicts."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the judges of an ensemble; empty for a single judge."""
        ...

    def __call__(
        self, prompts: Sequence[JudgedPrompt], pairs: Sequence[tuple[str, str]]
    ) -> list[Verdict]:
        """Return one verdict for each prompt and its pair of answers, in order."""
        ...


def swapped(verdict: Verdict) -> Verdict:
    """Exchange `first` and `second` in a verdict and its votes, as for swapped answers."""
    return Verdict(
        winner={"first": "second", "second": "first"}.get(verdict.winner, verdict.winner),
        probability=None if verdict.probability is None else 1 - verdict.probability,
        reason=verdict.reason,
        votes=tuple(map(swapped, verdict.votes)),
    )
