"""The interface of a chat model that judges, and the records it exchanges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Message = dict[str, str]
"""`role` and `content`."""

Question = list[Message]
"""The messages of one chat, the last one the user's."""


@dataclass(frozen=True)
class Reply:
    """The reply to one question."""

    text: str | None
    """Text of the reply; None if every call failed."""

    error: str = ""
    """Why there is no text."""

    tokens: int = 0
    """Tokens of question and reply together."""


class ChatModel(Protocol):
    """Answers questions."""

    @property
    def name(self) -> str:
        """Name of the model in a setting: `openai:MODEL` or `transformers:PATH`."""
        ...

    @property
    def version(self) -> str:
        """What determines its replies beside the question: address, weights, sampling settings."""
        ...

    def ask(self, questions: Sequence[Question], keep: Callable[[int, Reply], None]) -> None:
        """Ask every question and call `keep(number, reply)` when its reply arrives.

        `keep` is called once per question, from one thread.

        Raises:
            JudgeError: no question can be answered (wrong key, model or address), or the budget
                is spent.
        """
        ...
