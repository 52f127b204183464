"""Render and encode chat messages with the tokenizer's chat template."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

from jinja2 import Environment, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from ppo_core.config.row_settings import PromptFormat
from ppo_core.data.rows.template_process import MAX_BYTES, Rendered, TemplateProcess
from ppo_core.data.segments import Segment, encode_sequence
from ppo_core.errors import ConfigError, DataError, TrainingError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Template that writes the role before each message; for tokenizers without a template."""

MAX_RENDER_SECONDS = 10
"""Maximum seconds of CPU time to render one conversation; usually it takes about a millisecond."""

_ROLES = ("system", "user", "assistant", "tool", "ipython")
"""Roles that templates know. A template may change or leave out their messages on purpose."""

_PROCESS = TemplateProcess()

Messages = Sequence[Mapping[str, str]]
"""Conversation: messages with the keys "role" and "content", oldest first."""


def is_messages(value: object) -> TypeGuard[Messages]:
    """Return whether a value is a non-empty conversation, not text or token ids."""
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(message, Mapping) for message in value)
    )


def set_prompt_format(tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat) -> None:
    """Set a tokenizer to read prompts as a chat or as text; saved files keep this format.

    For text, remove the chat template. For a chat, set the end-of-sequence token to the token with
    which the template ends a turn of the assistant. These two tokens differ in many base models,
    and training and sampling end a response with the end-of-sequence token.

    Raises:
        ConfigError: a chat is wanted, but the tokenizer has no template; or `prompt_format` is not
            "text", but the tokenizer has several templates and none with the name "default".
        DataError: the template needs more than `MAX_RENDER_SECONDS`, or too much memory.
    """
    if prompt_format == "text":
        tokenizer.chat_template = None
    elif isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        raise ConfigError(
            f"The tokenizer of '{tokenizer.name_or_path}' has the chat templates "
            f"{', '.join(sorted(tokenizer.chat_template))}, and none with the name default. Set "
            "its chat_template to one of them, or set prompt_format to text."
        )
    elif tokenizer.chat_template is not None:
        end = _end_of_turn(tokenizer)
        if end is not None and end != tokenizer.eos_token_id:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    elif prompt_format == "chat":
        raise ConfigError(
            f"prompt_format is chat, but the tokenizer of '{tokenizer.name_or_path}' has no chat "
            "template. Set its chat_template, or set prompt_format to text."
        )


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the special token that the template writes directly after an answer.

    Return None if there is no special token, or if the template rejects the sample conversation or
    does not write its answer.
    """
    answer = "an answer"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
    try:
        text = render_chat(tokenizer, turns, answer_follows=False)
    except RejectedChatError:
        return None
    tail = text.rpartition(answer)[2] if answer in text else ""
    ids: list[int] = tokenizer(tail, add_special_tokens=False)["input_ids"]
    special = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
    return ids[0] if ids and ids[0] in special.union(tokenizer.all_special_ids) else None


class RejectedChatError(DataError):
    """A chat template refuses a conversation."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, answer_follows: bool
) -> str:
    """Return the text of a conversation; `answer_follows` adds the start of an assistant turn.

    Raises:
        DataError: the tokenizer has no chat template, the template rejects the conversation or
            needs too much time or memory, or the role or content of a message is not text.
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
    return _render(tokenizer, messages, answer_follows=answer_follows).text


def has_generation_mask(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template marks the assistant's tokens (`{% generation %}`)."""
    return _GENERATION.search(tokenizer.get_chat_template()) is not None


def encode_with_mask(
    tokenizer: PreTrainedTokenizerBase, messages: Messages
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and a mask with 1 for each token of the assistant.

    The template must mark the tokens of the assistant (`has_generation_mask`).

    Raises:
        ConfigError: the tokenizer cannot locate its tokens in a text.
        DataError: the template rejects the conversation, or needs too much time or memory.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"The chat template of '{tokenizer.name_or_path}' marks the answers by {{% generation "
            f"%}}, but {type(tokenizer).__name__} cannot map tokens to positions in the "
            "text, so the tokens of the answers are unknown. Use a fast tokenizer, with a "
            "tokenizer.json, or remove the generation marks from the chat template."
        )
    text, spans = _render(tokenizer, messages, marks_answers=True)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A token counts if any part of it is in an answer, because tokenizers drop or merge spaces.
    mask = [
        int(any(first < end and begin < last for begin, end in spans))
        for first, last in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], mask


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    answer_follows: bool = False,
    marks_answers: bool = False,
) -> Rendered:
    """Render a conversation in a separate process with limited memory and time.

    Raises:
        DataError: the template cannot be used, or rejects the conversation.
        TrainingError: the process cannot be started, or was ended twice from outside.
    """
    request = {
        "conversations": [_without_none(messages)],
        "chat_template": tokenizer.get_chat_template(),
        "add_generation_prompt": answer_follows,
        "return_assistant_tokens_mask": marks_answers,
        **tokenizer.special_tokens_map,
    }
    template = f"The chat template of '{tokenizer.name_or_path}'"
    try:
        _refuse_powers(request["chat_template"])
        rendered = _PROCESS.render(request, MAX_RENDER_SECONDS)
    except TimeoutError as error:
        raise DataError(
            f"{template} needs more than {MAX_RENDER_SECONDS} s of CPU time for a conversation of "
            f"{len(messages)} messages, so it probably never ends. Set another chat_template."
        ) from error
    except MemoryError as error:
        raise DataError(
            f"{template} needs too much memory for a conversation of {len(messages)} messages: "
            f"{str(error) or f'over {MAX_BYTES >> 30} GiB'}. Set another chat_template."
        ) from error
    # Not a DataError: the reader would leave the row out, though nothing is wrong with it.
    except OSError as error:
        raise TrainingError(
            f"{template} could not be used for a conversation of {len(messages)} messages: {error}."
            " If the machine has no memory left (see `dmesg`), free memory. Then start again."
        ) from error
    except (SyntaxError, TemplateSyntaxError) as error:
        raise DataError(
            f"{template} cannot be used: {error}. Set another chat_template."
        ) from error
    except ValueError as error:  # raised by the template
        roles = ", ".join(message["role"] for message in messages)
        raise RejectedChatError(
            f"The chat template rejects messages with the roles {roles}: {error}. Reorder the "
            "messages of each row as the template requires, or set another chat_template."
        ) from error
    _refuse_unknown_roles(messages, rendered.text)
    return rendered


def _refuse_unknown_roles(messages: Messages, text: str) -> None:
    """Raise if a template has left out a message because it does not know the message's role."""
    for message in messages:
        if message["role"] not in _ROLES and message["content"].strip() not in text:
            raise RejectedChatError(
                f"The chat template leaves out messages with the role {message['role']!r:.80}, so "
                "the model would not read them. Use the roles system, user and assistant, or set "
                "another chat_template."
            )


def _without_none(messages: Messages) -> list[dict[str, Any]]:
    """Return messages without keys whose value is None, as `apply_chat_template` does."""
    return [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]


def missing_end(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return a list with the id of the end-of-sequence token; [] if a text already ends with it.

    Whitespace after the token is ignored, because many templates end a turn with the token and a
    line break.

    Raises:
        DataError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            "The tokenizer has no end-of-sequence token, which must end a response. Set the "
            "tokenizer's eos_token."
        )
    return [] if text.rstrip().endswith(str(tokenizer.eos_token)) else [tokenizer.eos_token_id]


def chat_segments(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, end: bool
) -> list[Segment]:
    """Return a conversation as segments; `end` appends a missing end-of-sequence token.

    Raises:
        DataError: `render_chat` fails, or `end` is True and the tokenizer has no end-of-sequence
            token.
    """
    text = render_chat(tokenizer, messages, answer_follows=False)
    return [Segment(text), *([Segment(missing_end(tokenizer, text))] if end else [])]


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, end: bool) -> list[int]:
    """Return the token ids of a conversation; for `end` see `chat_segments`.

    Raises:
        DataError: see `chat_segments`.
    """
    return encode_sequence(tokenizer, chat_segments(tokenizer, messages, end=end))


@lru_cache
def _refuse_powers(template: str) -> None:
    """Raise if a template has the operator `**`, which can use up the time limit in every row."""
    tokens = Environment(autoescape=False).lex(template)
    if any(kind == "operator" and value == "**" for _, kind, value in tokens):
        raise SyntaxError("the operator ** is not allowed")
