"""The verdict of a judge on a pair of answers; read a verdict from the reply of a chat model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ppo_core.data.chat_template import Messages

JudgedPrompt: TypeAlias = str | Messages
"""Text, or messages of a chat. A judge reads messages as the text that `shown_prompt` returns, or
renders them with the judge's own chat template."""

WINNERS = ("first", "second", "tie", "invalid")

MAX_REASON_CHARACTERS = 500
"""Maximum characters of a reply that become the reason of a verdict."""

_MARKUP = r"[\s*_`'\"#.!()\[\]]*"
_WORD = f"{_MARKUP}VERDICT{_MARKUP}:"
_LETTER = f"{_MARKUP}(A|B|TIE){_MARKUP}"
_VERDICT_LINE = re.compile(_WORD + _LETTER, re.IGNORECASE | re.ASCII)
_ONLY_LINE = re.compile(f"(?:{_WORD})?{_LETTER}", re.IGNORECASE | re.ASCII)
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_WINNERS = {"A": "first", "B": "second", "TIE": "tie"}


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


def read_verdict(text: str) -> Verdict:
    """Return the verdict of a reply; A is the first answer.

    A line counts if it has only a verdict. There must be at least one such line, and all must
    agree. A letter without the word VERDICT counts if it is the full reply. Reasoning in <think>
    tags is removed first.
    """
    answer = without_thoughts(text)
    lines = [line for line in answer.split("\n") if line.strip()]
    form = _ONLY_LINE if len(lines) == 1 else _VERDICT_LINE
    found = {match[1].upper() for line in lines if (match := form.fullmatch(line))}
    if len(found) != 1:
        fault = "verdicts that differ" if found else "no verdict"
        return Verdict("invalid", reason=f"The reply has {fault}: {reply_as_reason(text)!r}")
    reasons = "\n".join(line for line in lines if not form.fullmatch(line))
    return Verdict(_WINNERS[found.pop()], reason=reply_as_reason(reasons))


def without_thoughts(text: str) -> str:
    """Remove the reasoning of a reply, even if the opening tag of the reasoning is missing.

    Some chat templates write the opening tag before the reply.
    """
    return _THOUGHT.sub("", text).rpartition("</think>")[2]


def reply_as_reason(text: str) -> str:
    """Return a reply, cut after MAX_REASON_CHARACTERS characters."""
    text = text.strip()
    return text if len(text) <= MAX_REASON_CHARACTERS else f"{text[:MAX_REASON_CHARACTERS]} ..."
