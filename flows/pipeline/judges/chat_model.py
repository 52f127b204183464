"""A chat model that answers questions: what a judge needs of one, wherever it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Message = dict[str, str]
"""`role` and `content`."""

Question = list[Message]
"""The messages of one chat, the last one the user's."""


@dataclass(frozen=True)
class Reply:
    """What came back for one question."""

    text: str | None
    """The reply; None if none came, however often the call was repeated."""

    error: str = ""
    """Why none came."""

    tokens: int = 0
    """Tokens of the question and the reply together."""


class ChatModel(Protocol):
    """Answers questions."""

    @property
    def name(self) -> str:
        """The model as a person names it: `openai:MODEL` or `transformers:PATH`."""
        ...

    @property
    def version(self) -> str:
        """What decides its replies beside the question: address, weights, sampling settings."""
        ...

    def ask(self, questions: Sequence[Question], keep: Callable[[int, Reply], None]) -> None:
        """Ask every question; `keep(number, reply)` is called as soon as each reply is there.

        It is called once for every question, from one thread.

        Raises:
            JudgeError: no question can be answered (wrong key, model or address), or the budget
                is spent.
        """
        ...
