"""Keep passwords, keys and tokens out of messages, logs and files.

A secret is

- the value of an environment variable whose name says so, for example OPENAI_API_KEY;
- a password or token within the value of any environment variable, for example the password in
  MLFLOW_TRACKING_URI, also where it appears without the address;
- a text in the form of a well-known token, for example hf_...;
- the user, the password and the query of any URL.
"""

import atexit
import html
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TextIO, cast
from urllib.parse import quote, quote_plus, unquote

MASK = "(hidden)"
"""Text in the place of a secret; Metaflow would take asterisks for its marks of bold text."""

MIN_SECRET_CHARACTERS = 8
"""Shorter values of environment variables are not masked, because they are often common words."""

MAX_LINE_CHARACTERS = 10_000
"""In a longer line of output, which is data and no message, URLs keep their query."""

_NAME_OF_SECRET = re.compile(
    r"(?:KEY|KEY_?ID|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PASS|_PWD|CREDENTIALS?|SIGNATURE|\bSIG"
    r"|CONNECTION_STRING)[_-]?\d*$",
    re.IGNORECASE,
)
_USER_OF_URL = re.compile(r"://(?:[^/?#\s]*@)?([^?\s]*)(?:\?\S*)?")
_PASSWORD_OF_URL = re.compile(r"://[^/?#\s:@]*:([^/?#\s]+)@")
# Database drivers accept a slash in a password; digits before a slash are a port.
_ODD_PASSWORD_OF_URL = re.compile(r"://[^/?#\s:@]*:(?!\d*(?:[/?#]|$))((?:(?!://)\S)+)@")
_TOKEN_OF_WEB_URL = re.compile(r"\bhttps?://([^/?#\s:@]+)@")
_IN_URLS = (_PASSWORD_OF_URL, _ODD_PASSWORD_OF_URL, _TOKEN_OF_WEB_URL)
_PAIR = re.compile(r"([\w.-]+)=([^&;\s#\"']+)")
_QUERY = re.compile(r"://[^?\s]*\?(\S+)")
_TOKEN = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2}))"
    r"(?:hf_[A-Za-z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}"
    r"|xox[a-z]-[\w-]{8,}|A[KS]IA[0-9A-Z]{12,}"
    # These do not begin within a word with hyphens, so that no text takes quadratic time.
    r"|(?:(?<![\w-])|(?<=%[0-9A-Fa-f]{2}))"
    r"(?:sk-(?=[\w-]*\d)[\w-]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*))"
)
_AUTHORIZATION = re.compile(
    r"(authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic)\s+)?)[^\s'\",]{8,}", re.IGNORECASE
)
_UNFINISHED = re.compile(
    r"(?:(?<!\w)\w+://\S*|(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox|A[KS]IA|eyJ)\S*)$"
)


def redact(text: object) -> str:
    """Return `text` without secrets, and without user, password and query in every URL."""
    return _USER_OF_URL.sub(r"://\1", mask_secrets(str(text)))


def mask_secrets(text: str) -> str:
    """Return `text` with secrets masked; URLs without a secret keep user and query.

    Use it for documents that quote texts of models and data sets: a query there is no secret.
    """
    for secret in _secrets():
        text = text.replace(secret, MASK)
    return _AUTHORIZATION.sub(rf"\1{MASK}", _TOKEN.sub(MASK, text))


def names_secret(name: str) -> bool:
    """Return whether a name of a variable or setting says that its value is secret."""
    return _NAME_OF_SECRET.search(name) is not None


def describe_secret(text: str) -> str | None:
    """Return what kind of secret a setting's value holds, without the secret; None if none."""
    for secret, name in _secrets().items():
        if secret in text:
            return f"the secret of the environment variable {name}"
    if any(has.search(text) for has in _IN_URLS):
        return "an address with a user or password"
    if any(_secrets_in_pairs(query) for query in _QUERY.findall(text)):
        return "an address with a token"
    return "a token" if _TOKEN.search(text) else None


def install_redaction() -> None:
    """Redact everything that this process writes to stdout and stderr from now on.

    This includes tracebacks, warnings and log records, also of log handlers that exist already. A
    native library or a child process that writes to the file descriptors itself is not redacted.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, RedactedStream):
            continue
        redacted = RedactedStream(stream)
        setattr(sys, name, redacted)
        # Otherwise the end of the last line could be lost.
        atexit.register(redacted.release)
        for handler in _log_handlers():
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.setStream(cast(TextIO, redacted))


class RedactedStream:
    """A text stream that redacts text and writes it to another stream.

    Text is written at once. Only the last characters of a line are held until the next write or
    `flush` if they may begin a secret. So a secret that is split between two writes is found, and
    progress bars work as usual.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream
        self._held = ""
        self._renew_lock()
        # A process forked during a write would wait for the lock forever.
        os.register_at_fork(after_in_child=self._renew_lock)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other stream, such as `encoding` or `isatty`."""
        return getattr(self._stream, name)

    @property
    def buffer(self) -> "_RedactedBuffer":
        """The other stream's bytes, redacted too."""
        return _RedactedBuffer(self)

    def write(self, text: str) -> int:
        """Write `text` without its secrets; return its length."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            text, kept = self._held + text, len(text)
            cut = _end_of_finished(text)
            self._held = text[cut:]
            if cut:
                self._stream.write(_redact_lines(text[:cut]))
        return kept

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the held text, except the beginning of a known secret, and flush."""
        with self._lock:
            cut = _end_before_secret(self._held, least=4)
            ready, self._held = self._held[:cut], self._held[cut:]
            if ready:
                self._stream.write(_redact_lines(ready))
            self._stream.flush()

    def release(self) -> None:
        """Write all held text, because no more text follows."""
        with self._lock:
            if self._held:
                self._stream.write(_redact_lines(self._held))
                self._held = ""

    def _renew_lock(self) -> None:
        # Reentrant, because a signal handler may write during a write.
        self._lock = threading.RLock()


class _RedactedBuffer:
    """The bytes of a RedactedStream."""

    def __init__(self, text: RedactedStream) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text._stream.buffer, name)

    def write(self, data: bytes) -> int:
        self._text.release()
        self._text._stream.flush()
        # Latin-1 maps every byte to one character and back.
        clean = _redact_lines(bytes(data).decode("latin-1"))
        self._text._stream.buffer.write(clean.encode("latin-1"))
        return len(data)


def _redact_lines(text: str) -> str:
    if len(text) > MAX_LINE_CHARACTERS:
        lines = text.splitlines(keepends=True)
        return "".join(
            mask_secrets(line) if len(line) > MAX_LINE_CHARACTERS else redact(line)
            for line in lines
        )
    return redact(text)


def _end_of_finished(text: str) -> int:
    """Return the length of `text` without its last characters that may begin a secret."""
    line = max(text.rfind("\n"), text.rfind("\r")) + 1
    if not line < len(text) <= line + MAX_LINE_CHARACTERS:
        return len(text)
    unfinished = _UNFINISHED.search(text, line)
    end = _end_before_secret(text, least=1)
    return min(end, unfinished.start()) if unfinished else end


def _end_before_secret(text: str, *, least: int) -> int:
    """Return the length of `text` without its last characters that begin a known secret.

    Fewer than `least` such characters are not counted.
    """
    longest = 0
    for secret in _secrets():
        for length in range(min(len(secret) - 1, len(text)), max(longest, least - 1), -1):
            if text.endswith(secret[:length]):
                longest = length
                break
    return len(text) - longest


def _secrets() -> Mapping[str, str]:
    """Return the name of the environment variable of each secret, the longest secret first."""
    return _secrets_of(tuple(os.environ.items()))


@lru_cache(maxsize=4)
def _secrets_of(environment: tuple[tuple[str, str], ...]) -> dict[str, str]:
    found = {
        form: name
        for name, value in environment
        for secret in _secrets_in(name, value)
        for form in _forms(secret)
        if len(form) >= MIN_SECRET_CHARACTERS
    }
    return {secret: found[secret] for secret in sorted(found, key=len, reverse=True)}


def _secrets_in(name: str, value: str) -> Iterator[str]:
    """Yield the secrets in one environment variable; a key of several lines has one per line."""
    if names_secret(name):
        yield from (line.strip() for line in value.splitlines() if "-----" not in line)
    for pattern in _IN_URLS:
        yield from pattern.findall(value)
    yield from _secrets_in_pairs(value)


def _secrets_in_pairs(text: str) -> list[str]:
    """Return the values of `name=value` in a query or connection string that are secret."""
    return [value for name, value in _PAIR.findall(text) if names_secret(name)]


def _forms(secret: str) -> set[str]:
    """Return the forms in which URLs, JSON, Python and HTML show a secret."""
    plain = {secret, unquote(secret)}
    quoted = {write(one) for one in plain for write in (quote, quote_plus, repr, json.dumps)}
    quoted |= {quote(one, safe="") for one in plain} | {html.escape(one) for one in plain}
    return plain | {one.strip("\"'") for one in quoted}


def _log_handlers() -> Iterator[logging.Handler]:
    for logger in (logging.root, *map(logging.getLogger, tuple(logging.root.manager.loggerDict))):
        yield from logger.handlers
