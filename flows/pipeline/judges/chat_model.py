"""The interface of a chat model that judges, and the types of its questions and replies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Message = dict[str, str]
"""A chat message with the keys `role` and `content`."""

Question = list[Message]
"""The messages of one chat; the last message has the role `user`."""


@dataclass(frozen=True)
class Reply:
    """The reply to one question."""

    text: str | None
    """Text of the reply; None if there is no reply."""

    error: str = ""
    """Reason why `text` is None; empty otherwise."""

    tokens: int = 0
    """Number of tokens of the question plus the reply."""


class ChatModel(Protocol):
    """A chat model that answers independent questions."""

    @property
    def name(self) -> str:
        """Name of the model in a setting: `openai:MODEL` or `transformers:PATH`."""
        ...

    @property
    def version(self) -> str:
        """Text that identifies the weights or the address, and the sampling settings."""
        ...

    def ask(self, questions: Sequence[Question], keep: Callable[[int, Reply], None]) -> None:
        """Ask every question and call `keep(number, reply)` when its reply arrives.

        `keep` is called once per question, from one thread.

        Raises:
            JudgeError: the model cannot answer any question (for example because of a wrong key,
                model or address), or the budget is spent.
        """
        ...
