"""Rendering and encoding of chat messages with the tokenizer's chat template."""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import TypeGuard

from jinja2 import Environment
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase

from ppo_core.errors import DataError

MAX_RENDER_SECONDS = 10
"""Time limit for rendering one conversation; a template takes about a millisecond."""

Messages = Sequence[Mapping[str, str]]
"""Conversation: messages with the keys "role" and "content", oldest first."""


def is_messages(value: object) -> TypeGuard[Messages]:
    """Return whether a value is a non-empty conversation, not text or token ids."""
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(message, Mapping) for message in value)
    )


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, answer_follows: bool
) -> str:
    """Return the text of a conversation; `answer_follows` appends the start of an assistant turn.

    Raises:
        DataError: the tokenizer has no chat template, the template rejects the conversation, or
            the role or content of a message is not text.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "The tokenizer has no chat template, so messages cannot be rendered. Set its "
            "chat_template, start from a chat model, or give text instead of messages."
        )
    for message in messages:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise DataError(
                f"A message must have the text fields 'role' and 'content', but is "
                f"{message!r:.120}. Fix or remove its row."
            )
    try:
        with _time_limit(MAX_RENDER_SECONDS):
            _refuse_powers(tokenizer.get_chat_template())
            return str(
                tokenizer.apply_chat_template(
                    list(map(dict, messages)), add_generation_prompt=answer_follows, tokenize=False
                )
            )
    except TimeoutError as error:
        raise DataError(
            f"The chat template of '{tokenizer.name_or_path}' needs more than "
            f"{MAX_RENDER_SECONDS} s for a conversation of {len(messages)} messages, so it "
            "probably never ends. Set another chat_template."
        ) from error
    # A template is code of its author, which can raise errors of any type.
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"The chat template rejects messages with the roles {roles}: "
            f"{str(error) or type(error).__name__}. Reorder the "
            "messages of each row as the template requires, or set another chat_template."
        ) from error


def missing_end(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return [id of the end-of-sequence token], or [] if a rendered text already ends in it.

    Whitespace after the token is ignored, because many templates end a turn with the token and a
    line break.

    Raises:
        DataError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            "The tokenizer has no end-of-sequence token, which must end a conversation. Set the "
            "tokenizer's eos_token."
        )
    return [] if text.rstrip().endswith(str(tokenizer.eos_token)) else [tokenizer.eos_token_id]


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, end: bool) -> list[int]:
    """Return the token ids of a conversation; `end` appends a missing end-of-sequence token.

    Raises:
        DataError: `render_chat` fails, or `end` is True and the tokenizer has no end-of-sequence
            token.
    """
    text = render_chat(tokenizer, messages, answer_follows=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, *missing_end(tokenizer, text)] if end else ids


@lru_cache
def _refuse_powers(template: str) -> None:
    """Raise for the operator `**`, because no time limit interrupts one large power."""
    tokens = Environment(autoescape=False).lex(template)
    if any(kind == "operator" and value == "**" for _, kind, value in tokens):
        raise SecurityError("the operator ** is not allowed")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the context after some seconds.

    Only the main thread can be interrupted; other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"More than {seconds} s")

    earlier_handler = signal.signal(signal.SIGALRM, stop)
    earlier_timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *earlier_timer)
        signal.signal(signal.SIGALRM, earlier_handler)
