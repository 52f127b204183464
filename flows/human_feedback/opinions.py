"""Records of a user's opinion on an answer, and of an opinion that is left out."""

from dataclasses import dataclass
from datetime import UTC, datetime

from ppo_core.data.chat_template import Messages
from ppo_core.data.prompts import count_characters

MOST_CHARACTERS = 200_000
"""Maximum number of characters of a prompt or an answer."""


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """What one user thinks of one answer, or of two answers to one prompt."""

    prompt: str | Messages

    liked: str | None
    """The answer that the user likes, or prefers to `disliked`; None if the user likes none."""

    disliked: str | None
    """The answer that the user dislikes; None if the user dislikes none."""

    user: str
    """Id of the user; empty if it is unknown."""

    version: str
    """Version of the registered model that gave the answer; empty if it is unknown."""

    time: datetime | None
    """Time of the opinion; None if it is unknown."""

    source: str
    """Id of the trace, or file and row number."""

    @property
    def is_pair(self) -> bool:
        """Whether the opinion compares two answers."""
        return self.liked is not None and self.disliked is not None


@dataclass(frozen=True)
class LeftOut:
    """An opinion that is not used."""

    source: str
    reason: str
    user: str = ""


def size_fault(*texts: object) -> str:
    """Return the reason for refusing the texts if one is too long; otherwise an empty string."""
    most = max(map(count_characters, texts))
    if most <= MOST_CHARACTERS:
        return ""
    return f"a text has {most:,} characters, and at most {MOST_CHARACTERS:,} are read"


def time_of(milliseconds: int | None) -> datetime | None:
    """Convert a timestamp of MLflow to a time in UTC."""
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)
