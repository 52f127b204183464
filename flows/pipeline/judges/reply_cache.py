"""Store replies by a digest of their question, so that no reply is paid for twice."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pipeline.judges.chat_model import ChatModel, Question, Reply
from pipeline.storage.addresses import S3Address
from ppo_core.errors import JudgeError, reason_of
from ppo_core.io.atomic_files import write_atomically
from ppo_core.io.progress_bar import BAR_DELAY, progress

Case: TypeAlias = tuple[str, str, str]
"""(prompt, first answer, second answer). If one answer is scored, the second answer is empty."""

Read = TypeVar("Read")


def reply_key(model: str, wording: str, prompt: str, first: str, second: str, attempt: int) -> str:
    """Return the key of a reply: a digest of the model and of what determines the question.

    Args:
        model: version of the chat model.
        wording: version of the judge's prompt, which includes the criterion.
        prompt: the prompt that both answers reply to.
        first: the answer that is shown first.
        second: the answer that is shown second.
        attempt: number of the attempt, from 1.
    """
    parts = json.dumps([model, wording, prompt, first, second, attempt])
    return hashlib.sha256(parts.encode()).hexdigest()


class ReplyCache:
    """Stores each reply in its own file, written atomically, and in S3 for other machines."""

    def __init__(self, folder: Path, shared: S3Address | None = None) -> None:
        """Use `folder` for the replies; the first `put` creates it.

        `shared` is the address of the replies in S3; None if all machines share the folder.
        """
        self._folder, self._shared = folder, shared

    def get(self, key: str) -> Reply | None:
        """Return the stored reply for a key from `reply_key`; None if there is none.

        Raises:
            JudgeError: the file of the key does not have the format that `put` writes.
            StorageError: S3 does not answer.
        """
        path = self._path(key)
        try:
            written = path.read_bytes()
        except FileNotFoundError:
            return self._fetch_shared(key)
        except OSError as error:
            raise JudgeError(
                f"{path} cannot be read: {error.strerror}. Delete it; the model will then be "
                "asked, and paid, for this reply again."
            ) from error
        return _reply_of(written, path)

    def put(self, key: str, reply: Reply) -> None:
        """Store a reply with a text: on disk, and also in S3 if there is a shared address.

        Raises:
            StorageError: S3 does not answer.
        """
        content = json.dumps({"text": reply.text, "tokens": reply.tokens}).encode()
        self._write(key, content)
        if self._shared is not None:
            from pipeline.storage.objects import write_object

            write_object(self._address(key), content)

    def _write(self, key: str, content: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)

    def _fetch_shared(self, key: str) -> Reply | None:
        """Return and store the reply of another machine from S3; return None if there is none."""
        if self._shared is None:
            return None
        # Imported here, because `objects` imports boto3, which a run without S3 does not need.
        from pipeline.storage.objects import read_object

        found = read_object(self._address(key))
        if found is None:
            return None
        reply = _reply_of(found[0], self._address(key))
        self._write(key, found[0])
        return reply

    def _address(self, key: str) -> S3Address:
        assert self._shared is not None
        return self._shared.below(f"{key[:2]}/{key}.json")

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"


def ask_until_read(
    chat: ChatModel,
    cache: ReplyCache,
    cases: Sequence[Case],
    *,
    wording: str,
    attempts: int,
    pose: Callable[[Case, int], Question],
    read: Callable[[Reply], Read],
    is_invalid: Callable[[Read], bool],
) -> dict[Case, Read]:
    """Ask a chat model about cases, and return the results of reading its replies.

    If a reply cannot be read, the model is asked again. Equal cases are asked once. If a reply is
    not in the cache, `chat` is asked. A case without a reply is not asked again in this call, and
    nothing is stored for it.

    Args:
        chat: the chat model.
        cache: stored replies.
        cases: the cases.
        wording: version of the questions' wording.
        attempts: maximum number of times to ask.
        pose: function of a case and the number of the attempt, from 1, that returns the question.
        read: function that reads a reply.
        is_invalid: function that returns whether a result of `read` is invalid.

    Raises:
        JudgeError: the model cannot be asked, or the budget is spent. All earlier replies are
            stored.
    """
    found: dict[Case, Read] = {}
    unread = list(dict.fromkeys(cases))
    for attempt in range(1, attempts + 1):
        questions = {
            case: (reply_key(chat.version, wording, *case, attempt), pose(case, attempt))
            for case in unread
        }
        replies = _replies(chat, cache, questions, f"judging, attempt {attempt}")
        found |= {case: read(reply) for case, reply in replies.items()}
        unread = [
            case
            for case, reply in replies.items()
            if reply.text is not None and is_invalid(found[case])
        ]
    return found


def _replies(
    chat: ChatModel,
    cache: ReplyCache,
    questions: Mapping[Case, tuple[str, Question]],
    description: str,
) -> dict[Case, Reply]:
    """Return the reply to each case, from the cache or from the model.

    `questions` maps a case to the key of its reply and its question.
    """
    kept = {case: cache.get(key) for case, (key, _) in questions.items()}
    # Earlier versions stored blank replies, which have no verdict.
    replies = {case: reply for case, reply in kept.items() if reply and (reply.text or "").strip()}
    missing = [case for case in questions if case not in replies]
    if not missing:
        return replies
    # PPO asks few questions at a time, so the bar is shown only after a delay.
    with progress(len(missing), description, "question", delay=BAR_DELAY) as bar:

        def keep(number: int, reply: Reply) -> None:
            case = missing[number]
            if reply.text is not None:
                cache.put(questions[case][0], reply)
            replies[case] = reply
            bar.update()

        chat.ask([questions[case][1] for case in missing], keep)
    return replies


def _reply_of(written: bytes, place: Path | S3Address) -> Reply:
    try:
        # Not `parse_strict_json`: a model's reply may have half of a surrogate pair.
        return _reply_in(json.loads(written))
    except (ValueError, RecursionError) as error:
        raise JudgeError(
            f"{place} does not contain a stored reply: {reason_of(error)}. Delete the file; the "
            "model will then be asked, and paid, for this reply again."
        ) from error


def _reply_in(fields: Any) -> Reply:
    match fields:
        case {"text": str(text), "tokens": int(tokens)} if 0 <= tokens < 2**63:
            return Reply(text, tokens=tokens)
    raise ValueError(f"it holds {fields!r:.80} instead of a text and a number of tokens")
