"""Read the verdict in the reply of a chat model that was asked by `judge_prompt.pose`."""

import re

from pipeline.judges.verdict import Verdict

MAX_REASON_CHARACTERS = 500
"""Maximum characters of a reply that become the reason of a verdict."""

_MARKUP = r"[\s*_`'\"#.!()\[\]]*"
_WORD = f"{_MARKUP}VERDICT{_MARKUP}:"
_LETTER = f"{_MARKUP}(A|B|TIE){_MARKUP}"
_VERDICT_LINE = re.compile(_WORD + _LETTER, re.IGNORECASE | re.ASCII)
_ONLY_LINE = re.compile(f"(?:{_WORD})?{_LETTER}", re.IGNORECASE | re.ASCII)
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_WINNERS = {"A": "first", "B": "second", "TIE": "tie"}


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
