"""Replies on disk under the digest of their question, so no reply is paid for twice."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.judges.chat_model import Reply
from ppo_core.data.atomic_files import write_atomically
from ppo_core.errors import JudgeError


def reply_key(model: str, wording: str, prompt: str, first: str, second: str, attempt: int) -> str:
    """Return the digest that a reply is stored under.

    Args:
        model: version of the chat model.
        wording: version of the prompt, the criterion included.
        prompt: the prompt of both answers.
        first: the answer that is shown first.
        second: the answer that is shown second.
        attempt: number of the attempt, from 1.
    """
    parts = json.dumps([model, wording, prompt, first, second, attempt])
    return hashlib.sha256(parts.encode()).hexdigest()


class ReplyCache:
    """Stores each reply in a file of its own, which is complete once it has its final name."""

    def __init__(self, folder: Path) -> None:
        """Store the replies in `folder`, which the first reply creates."""
        self._folder = folder

    def get(self, key: str) -> Reply | None:
        """Return the reply stored under a key of `reply_key`; None if there is none.

        Raises:
            JudgeError: `put` did not write the file of that key.
        """
        path = self._path(key)
        try:
            written = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return _reply_in(json.loads(written))
        except ValueError as error:
            raise JudgeError(
                f"{path} is no reply that was kept here: {error}. Delete the file, and its "
                "question is asked, and paid for, again."
            ) from error

    def put(self, key: str, reply: Reply) -> None:
        """Store a reply that has a text; it is on the disk when this returns."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"text": reply.text, "tokens": reply.tokens}))

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"


def _reply_in(fields: Any) -> Reply:
    match fields:
        case {"text": str(text), "tokens": int(tokens)}:
            return Reply(text, tokens=tokens)
    raise ValueError(f"it holds {fields!r:.80}, no text and number of tokens")
