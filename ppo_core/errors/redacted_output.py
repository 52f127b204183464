"""Redact the output of a process to stdout and stderr, including log records and tracebacks.

Control characters in the output are escaped.
"""

import atexit
import logging
import os
import re
import sys
import threading
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from ppo_core.errors.control_characters import escape_bytes, escape_output
from ppo_core.errors.redaction import known_secrets, mask_secrets, redact

MAX_LINE_CHARACTERS = 10_000
"""Length of the longest line in which URLs are redacted. Longer lines are data, not messages, so
their URLs keep user and query."""

_UNFINISHED = re.compile(
    r"(?:(?<!\w)\w+://\S*|(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox|A[KS]IA|eyJ)\S*)$"
)


def install_redaction() -> None:
    """Redact everything that this process writes to stdout and stderr from now on.

    This includes tracebacks, warnings, and log records, also from existing log handlers. Output
    that a native library or a child process writes directly to the file descriptors is not
    redacted.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, RedactedStream):
            continue
        redacted = RedactedStream(stream)
        setattr(sys, name, redacted)
        # Without this, the held end of the last line could be lost.
        atexit.register(redacted.release)
        for handler in _log_handlers():
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.setStream(cast(TextIO, redacted))


class RedactedStream:
    """A text stream that redacts and escapes text, and writes it to an underlying stream.

    Text is written at once, except the last characters of a line that may begin a secret. These
    characters are held until later text completes or rules out the secret, or until `flush` or
    `release`. Therefore a secret that is split between two writes of text is found, and progress
    bars work as usual.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream
        self._held = _HeldText()
        self._bytes = _RedactedBuffer(self)
        self._renew_lock()
        # A process that is forked during a write needs a new lock: the old lock is never released.
        os.register_at_fork(after_in_child=self._renew_lock)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the underlying stream, such as `encoding` or `isatty`."""
        return getattr(self._stream, name)

    @property
    def buffer(self) -> "_RedactedBuffer":
        """The binary buffer of the underlying stream; bytes that are written to it are redacted."""
        return self._bytes

    def write(self, text: str) -> int:
        """Write `text` without its secrets; return the length of `text`."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        kept = len(text)
        if not text:
            return 0
        text = escape_output(text, is_terminal=self._is_terminal())
        with self._lock:
            self._bytes.release()
            self._pass_on(self._held.add(text))
        return kept

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the held text and flush.

        If 4 or more characters at the end of the held text begin a known secret, keep them.
        """
        with self._lock:
            self._pass_on(self._held.flush())
            self._bytes.pass_on_finished()
            self._stream.flush()

    def release(self) -> None:
        """Write all held text, because no more text follows."""
        with self._lock:
            self._pass_on(self._held.release())
            self._bytes.release()

    def _pass_on(self, text: str) -> None:
        if text:
            self._stream.write(text)

    def _is_terminal(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def _renew_lock(self) -> None:
        # Reentrant, because a signal handler may write during a write.
        self._lock = threading.RLock()


class _RedactedBuffer:
    """The binary buffer of a RedactedStream; it also holds characters that may begin a secret.

    Bytes that are not UTF-8 are decoded to surrogates, and encoded to the same bytes again.
    """

    def __init__(self, text: RedactedStream) -> None:
        self._text = text
        self._held = _HeldText()
        # The decoder holds the first bytes of a character until the rest follows.
        self._decoder = getincrementaldecoder("utf-8")("surrogateescape")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text._stream.buffer, name)

    def write(self, data: bytes) -> int:
        with self._text._lock:
            self._text._pass_on(self._text._held.release())
            self._text._stream.flush()
            self._pass_on(self._held.add(self._decoder.decode(bytes(data))))
        return len(data)

    def writelines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._text.flush()

    def pass_on_finished(self) -> None:
        """Write the held bytes, except the beginning of a known secret or of a character."""
        self._pass_on(self._held.flush())

    def release(self) -> None:
        """Write all held bytes."""
        ready = self._held.add(self._decoder.decode(b"", final=True))
        self._pass_on(ready + self._held.release())

    def _pass_on(self, text: str) -> None:
        if text:
            data = text.encode("utf-8", "surrogateescape")
            clean = escape_bytes(data, is_terminal=self._text._is_terminal())
            self._text._stream.buffer.write(clean)


class _HeldText:
    """Redacts text, and holds its last characters while they may begin a secret."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> str:
        """Add text; return the redacted text that is finished."""
        text = self._held + text
        return self._take(text, _end_of_finished(text))

    def flush(self) -> str:
        """Return the held text, but keep an end of 4 or more characters of a known secret."""
        return self._take(self._held, _end_before_secret(self._held, least=4))

    def release(self) -> str:
        """Return all held text."""
        return self._take(self._held, len(self._held))

    def _take(self, text: str, end: int) -> str:
        self._held = text[end:]
        return _redact_lines(text[:end]) if end else ""


def _redact_lines(text: str) -> str:
    if len(text) > MAX_LINE_CHARACTERS:
        # Mask before the lines are separated, because a private key has several lines.
        lines = mask_secrets(text).splitlines(keepends=True)
        return "".join(line if len(line) > MAX_LINE_CHARACTERS else redact(line) for line in lines)
    return redact(text)


def _end_of_finished(text: str) -> int:
    """Return where the end of `text` may be the start of a secret; if nowhere, its length."""
    line = max(text.rfind("\n"), text.rfind("\r")) + 1
    if not line < len(text) <= line + MAX_LINE_CHARACTERS:
        return len(text)
    unfinished = _UNFINISHED.search(text, line)
    end = _end_before_secret(text, least=1)
    return min(end, unfinished.start()) if unfinished else end


def _end_before_secret(text: str, *, least: int) -> int:
    """Return where the end of `text` is the start of a known secret; if nowhere, its length.

    A start of fewer than `least` characters is ignored.
    """
    longest = 0
    for secret in known_secrets():
        for length in range(min(len(secret) - 1, len(text)), max(longest, least - 1), -1):
            if text.endswith(secret[:length]):
                longest = length
                break
    return len(text) - longest


def _log_handlers() -> Iterator[logging.Handler]:
    for logger in (logging.root, *map(logging.getLogger, tuple(logging.root.manager.loggerDict))):
        yield from logger.handlers
