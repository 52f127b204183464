"""Replies on disk, each under a digest of its question, so that no reply is paid for twice."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.inputs.atomic_write import write_atomically
from pipeline.judges.chat_model import Reply
from ppo_core.errors import JudgeError


def reply_key(model: str, wording: str, prompt: str, first: str, second: str, attempt: int) -> str:
    """The digest under which a reply is kept.

    Args:
        model: version of the chat model.
        wording: version of the question's wording, the criterion included.
        prompt: what both answers answer.
        first: the answer that is shown first.
        second: the other one.
        attempt: the how-manieth time the question is asked, from 1.
    """
    parts = json.dumps([model, wording, prompt, first, second, attempt])
    return hashlib.sha256(parts.encode()).hexdigest()


class ReplyCache:
    """One file for each reply; whoever is interrupted, a file with its final name is whole."""

    def __init__(self, folder: Path) -> None:
        """Keep the replies in `folder`, which is made when the first one comes."""
        self._folder = folder

    def get(self, key: str) -> Reply | None:
        """The reply that was kept under a key of `reply_key`; None if there is none.

        Raises:
            JudgeError: the file under that key is none that `put` wrote.
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
        """Keep a reply that has a text; it is on the disk when this returns."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"text": reply.text, "tokens": reply.tokens})
        write_atomically(path, content.encode("ascii"), durable=True)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"


def _reply_in(fields: Any) -> Reply:
    match fields:
        case {"text": str(text), "tokens": int(tokens)}:
            return Reply(text, tokens=tokens)
    raise ValueError(f"it holds {fields!r:.80}, no text and number of tokens")
