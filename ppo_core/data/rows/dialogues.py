"""Convert prompts and responses of all known forms to one form: text, or messages of a chat."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.rows.row_error import RowError

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
"""Starts of the turns in a text of HH, the data set of Anthropic (arXiv:2204.05862)."""

_TURN = re.compile(f"({HUMAN}|{ASSISTANT})")

_ROLES = {HUMAN: "user", ASSISTANT: "assistant"}

Turns = list[dict[str, str]]


def as_prompt(value: Any, *, is_chat: bool) -> str | Turns:
    """Return a prompt as text, or as messages if `is_chat`.

    If `is_chat`, a text of HH becomes one message per turn, and any other text becomes one message
    of the user.

    Raises:
        RowError: the prompt is empty or malformed, is neither text nor messages, ends in an answer
            of the assistant, or consists of messages although the policy reads text.
    """
    if is_messages(value):
        if not is_chat:
            raise RowError(
                "with messages, but the policy reads text",
                "Name a policy with a chat template, or give text.",
            )
        if is_answered(value):
            raise RowError("with a prompt that ends in an answer of the assistant")
        return as_turns(value)
    if not isinstance(value, str):
        raise RowError("without a text or messages in the prompt")
    if not value.strip():
        raise RowError("with an empty prompt")
    if not is_chat:
        return value
    return _turns_of_text(value) if is_hh(value) else [{"role": "user", "content": value}]


def as_response(value: Any, name: str) -> str:
    """Return a response as text; `value` is a text, or a list of one message of the assistant.

    Raises:
        RowError: the value has another form; the message names the column, `name`.
    """
    if isinstance(value, str):
        return value
    if is_messages(value) and len(value) == 1:
        return last_answer(value)[1]
    raise RowError(f"without a text or one message of the assistant in {name}")


def as_turns(messages: Messages) -> Turns:
    """Return messages with only the keys role and content.

    Raises:
        RowError: the role or content of a message is not text.
    """
    if not all(isinstance(turn.get(key), str) for turn in messages for key in ("role", "content")):
        raise RowError("with a message whose role or content is not text")
    return [{"role": turn["role"], "content": turn["content"]} for turn in messages]


def is_answered(messages: Messages) -> bool:
    """Return whether the last message is the assistant's."""
    return messages[-1].get("role") == "assistant"


def last_answer(messages: Messages) -> tuple[Turns, str]:
    """Return the earlier messages of a conversation, and the text of the assistant's last message.

    Raises:
        RowError: the last message is not the assistant's, or a message is malformed.
    """
    *earlier, last = as_turns(messages)
    if last["role"] != "assistant":
        raise RowError("with a conversation that does not end in an answer of the assistant")
    return earlier, last["content"]


def is_hh(text: str) -> bool:
    """Return whether a text is a conversation in the form of HH."""
    return text.startswith(HUMAN) and ASSISTANT in text


def split_pair(
    prompt: Any, chosen: Any, rejected: Any, *, is_chat: bool, repeats_prompt: bool
) -> tuple[str | Turns, str, str]:
    """Return the prompt and two responses that do not repeat the prompt.

    If `prompt` is None or empty, the prompt is the common part of the conversations in `chosen` and
    `rejected`. Texts that are not of HH have no such part: they are returned unchanged with an
    empty prompt, or refused if `is_chat`. A given text prompt is removed from the responses if
    `repeats_prompt`, see `repeat_their_prompt`, or if the prompt is a conversation of HH.

    Raises:
        RowError: the responses do not answer the same prompt, a chat has no prompt, or a value has
            the wrong type.
    """
    if is_messages(chosen) and is_messages(rejected):
        (before, first), (other, second) = last_answer(chosen), last_answer(rejected)
        if before != other:
            raise RowError("whose two conversations differ before the last message")
        return as_prompt(_joined(prompt, before), is_chat=is_chat), first, second
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise RowError("without two texts or two lists of messages in chosen and rejected")
    if prompt is None or prompt == "":
        prompt, repeats_prompt = _common_turns(chosen, rejected), True
    if isinstance(prompt, str):
        if (repeats_prompt or is_hh(prompt)) and begin_with(prompt, chosen, rejected):
            chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
        if is_chat and is_hh(prompt):
            chosen, rejected = chosen.strip(), rejected.strip()
    if prompt is not None:
        return as_prompt(prompt, is_chat=is_chat), chosen, rejected
    if is_chat:
        raise RowError(
            "without a prompt, which a chat needs",
            "Add a column prompt, or set prompt_format to text.",
        )
    return "", chosen, rejected


def begin_with(prompt: str, *texts: str) -> bool:
    """Return whether all texts begin with the prompt, and the prompt is not empty."""
    return bool(prompt) and all(text.startswith(prompt) for text in texts)


def _joined(prompt: Any, before: Turns) -> Any:
    """Combine a prompt with `before`, the messages that two conversations have in common.

    Raises:
        RowError: the prompt does not belong to the conversations.
    """
    if not before or prompt is None or prompt == "":
        return before or prompt
    if isinstance(prompt, str):
        # A text prompt beside conversations, as in UltraFeedback, repeats one of the messages.
        if any(turn["content"] == prompt for turn in before):
            return before
    elif is_messages(prompt):
        given = as_turns(prompt)
        if before[: len(given)] == given:
            return before
        if given[-len(before) :] == before:
            return given
        if all(turn["role"] == "system" for turn in given):
            return [*given, *before]
    raise RowError("whose prompt is not the start of the conversations")


def _common_turns(chosen: str, rejected: str) -> str | None:
    """Return the common prompt of two texts of HH, or None for other texts.

    Raises:
        RowError: the texts differ before the last answer, or do not end in an answer.
    """
    if not (is_hh(chosen) and is_hh(rejected)):
        return None
    (before, _, answer), (other, _, second) = (
        text.rpartition(ASSISTANT) for text in (chosen, rejected)
    )
    if HUMAN in answer or HUMAN in second:
        raise RowError("with a conversation that does not end in an answer of the assistant")
    if before != other:
        raise RowError("whose two conversations differ before the last answer")
    return before + ASSISTANT


def _turns_of_text(text: str) -> Turns:
    """Return the messages of a text of HH; consecutive turns of one role become one message."""
    _, *parts = _TURN.split(text)
    turns: Turns = []
    for marker, content in zip(parts[::2], parts[1::2], strict=True):
        role, said = _ROLES[marker], content.strip()
        if not said:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += "\n\n" + said
        else:
            turns.append({"role": role, "content": said})
    if not turns or turns[-1]["role"] != "user":
        raise RowError("with a prompt that does not end in a turn of the human")
    return turns


def in_format_of(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages) -> str | Messages:
    """Return a prompt as messages if a tokenizer has a chat template, and otherwise as text.

    Raises:
        RowError: the tokenizer has a chat template, and `as_prompt` refuses the prompt.
    """
    if tokenizer.chat_template is None:
        return shown_prompt(prompt)
    return as_prompt(prompt, is_chat=True)


def shown_prompt(prompt: str | Messages | Sequence[int]) -> str:
    """Return a prompt as a text for a person or a judge.

    A single message of the user is returned as its text. A longer conversation becomes one
    paragraph per message, and each paragraph begins with the role.
    """
    if not is_messages(prompt):
        return str(prompt)
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
