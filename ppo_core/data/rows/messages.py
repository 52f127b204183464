"""Convert messages of all known forms to one form, with the keys role and content."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ppo_core.data.chat_template import is_messages
from ppo_core.data.rows.row_error import RowError

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""Name of a speaker in ShareGPT's form -> role. Some data sets write these names as roles."""

_MEDIA = (
    *("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url"),
    *("file", "input_file", "document", "tool_use", "tool_result", "thinking"),
)
"""Known types of message parts other than text. All of them are refused by name."""

_UNREAD = (
    *("tool_calls", "function_call", "tool_call_id"),
    *("reasoning_content", "reasoning", "thinking"),
)
"""Keys of messages that call a tool, contain its result, or contain the reasoning of an answer."""


def plain_messages(value: Any) -> Any:
    """Convert messages of any known form to the keys role and content.

    The known forms are messages with these keys, ShareGPT's `{"from": "human", "value": TEXT}`, and
    messages whose content is a list of parts, `{"type": "text", "text": TEXT}`. A single message
    becomes a list. Any value that is not messages is returned unchanged.

    Raises:
        RowError: a speaker is unknown, a part is not text, a list has no parts, a message has a key
            that changes its meaning but is not read, or messages are written as a JSON text.
    """
    if isinstance(value, str) and _is_json_of_messages(value):
        raise RowError(
            "with messages written as a JSON text",
            "Convert the text to a list of messages, and write JSON lines or parquet.",
        )
    if isinstance(value, Mapping) and ({"from", "value"} <= set(value) or _is_message(value)):
        value = [value]
    return [_plain(message) for message in value] if is_messages(value) else value


def _is_json_of_messages(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return is_messages(read) and all(
        _is_message(message) or {"from", "value"} <= set(message) for message in read
    )


def _is_message(value: Mapping[str, Any]) -> bool:
    return {"role", "content"} <= set(value)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    # If an Arrow column also has messages with role and content, each message has the keys of both
    # forms, and the unused keys are None.
    if role is None and "from" in message:
        role, content = _role_of(message["from"]), message.get("value")
    elif isinstance(role, str):
        role = _ROLES.get(role, role)
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = _text_of(content)
    for key in _UNREAD:
        if message.get(key):
            raise RowError(f"with a message that has {key}, but only role and content are read")
    if message.get("weight") == 0:
        raise RowError("with a message of weight 0, but all answers are trained")
    return {"role": role, "content": content}


def _role_of(speaker: Any) -> str:
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RowError(f"with a message that is not from any of {', '.join(_ROLES)}")
    return role


def _text_of(parts: Sequence[Any]) -> str:
    if not parts:
        raise RowError("with a message whose content is a list without parts")
    return "".join(map(_text_of_part, parts))


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _MEDIA:
        raise RowError(
            f"with a message whose content has a part of type {kind}, but only text is read"
        )
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise RowError("with a message whose content has a part that is not text")
    return text
