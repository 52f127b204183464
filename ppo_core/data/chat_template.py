"""Chat messages: what they are, and their text by a tokenizer's own template."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ppo_core.errors import DataError

Messages = Sequence[Mapping[str, str]]
"""A conversation: "role" and "content" of each message, oldest first."""


def is_messages(value: object) -> TypeGuard[Messages]:
    """Whether a value is a conversation of at least one message, and not text or token ids."""
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(message, Mapping) for message in value)
    )


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, answer_follows: bool
) -> str:
    """The text of a conversation; `answer_follows` opens the assistant's turn behind it.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the conversation,
            or a message lacks the text of its role or content.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            "The tokenizer has no chat template, so messages cannot become text. Set its "
            "chat_template, start from a chat model, or give text in the place of messages."
        )
    for message in messages:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise DataError(
                f"A message needs the texts 'role' and 'content'; it is {message!r:.120}. "
                "Mend or drop the row."
            )
    try:
        return str(
            tokenizer.apply_chat_template(
                list(map(dict, messages)), add_generation_prompt=answer_follows, tokenize=False
            )
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"The chat template refuses messages of the roles {roles}: {error}. Bring the rows "
            "into the order that it wants, or set another chat_template."
        ) from error


def missing_end(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The end-of-sequence token, as a list, or nothing where a conversation's text ends in it.

    Many templates end a turn with that token and a line break; such a text needs no second one.

    Raises:
        DataError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("The tokenizer has no end-of-sequence token to end a conversation with.")
    return [] if text.rstrip().endswith(str(tokenizer.eos_token)) else [tokenizer.eos_token_id]


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, end: bool) -> list[int]:
    """Token ids of a whole conversation; `end` sees to an end-of-sequence token at its end.

    Raises:
        DataError: as `render_chat`, or there is no end-of-sequence token to append.
    """
    text = render_chat(tokenizer, messages, answer_follows=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, *missing_end(tokenizer, text)] if end else ids
