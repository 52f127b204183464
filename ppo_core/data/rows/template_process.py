"""Render chat templates in a separate process with limited memory and time.

A template is code that the author of a model wrote. The sandbox of jinja2 limits neither memory nor
time, and Python cannot interrupt one large operation, such as `'x' * 10**10`. Therefore a separate
process renders templates, under limits that the operating system enforces. The process runs this
file, so this file must not import other modules of the project. The process ends when its parent
has ended.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError

MAX_BYTES = 1 << 30
"""Bytes that the process may allocate beyond its memory at the start; enforced only on Linux."""

MAX_GROWTH, MAX_OWN_CHARACTERS = 8, 1_000_000
"""Maximum characters of a rendered text: 8 for each byte of the request, plus 1,000,000."""

WALL_SECONDS = 30
"""Maximum seconds of wall time for each second of CPU time. A machine that swaps is slow."""

_NOT_OF_THE_TEMPLATE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGALRM)
"""Exit codes of a process that the machine or a person ended; like them, each code above 0."""

_ERRORS = {"memory": MemoryError, "syntax": SyntaxError, "raised": ValueError}
"""Kind of an error in the process that renders -> the error to raise."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str

    spans: list[tuple[int, int]]
    """Start and end of each part that the template marks as the assistant's, in characters."""


class TemplateProcess:
    """The process that renders templates; `render` starts it if needed. All threads share it."""

    def __init__(self) -> None:
        """Register the handlers for fork and exit; the process is not started yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def render(self, request: Mapping[str, Any], seconds: float) -> Rendered:
        """Return a rendered conversation.

        Args:
            request: arguments of transformers' `render_jinja_template`, for one conversation.
            seconds: maximum CPU time for rendering.

        Raises:
            TimeoutError: the template needs more than `seconds`.
            MemoryError: the template needs too much memory, or its text is too long.
            OSError: the process cannot be started, or was ended twice from outside.
            SyntaxError: the syntax of the template is wrong.
            ValueError: the template raised an error; the ValueError has the same message.
        """
        line = json.dumps({**request, "seconds": seconds}, default=_plain).encode() + b"\n"
        with self._lock:
            try:
                reply = self._ask(line)
            # After an interrupt, a late reply could be read as the answer to the next request.
            except BaseException:
                self._end()
                raise
        if "text" in reply:
            return Rendered(reply["text"], [(begin, end) for begin, end in reply["spans"]])
        raise _ERRORS[reply["kind"]](reply["error"])

    def _ask(self, line: bytes) -> dict[str, Any]:
        codes: list[int] = []
        while len(codes) < 2:
            process = self._started()
            reply = _answer(process, line)
            if reply.endswith(b"\n"):
                return dict(json.loads(reply))
            codes.append(process.wait())
            self._end()
            if codes[-1] == -signal.SIGPROF:
                raise TimeoutError
            if codes[-1] < 0 and codes[-1] not in _NOT_OF_THE_TEMPLATE:
                raise MemoryError(f"the process that renders it ended with the code {codes[-1]}")
        raise ChildProcessError(f"the process that renders it ended twice, with the codes {codes}")

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._process = subprocess.Popen(
                # -P: this folder must not be searched for modules.
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Ctrl-C must not end the renderer.
                start_new_session=True,
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _forget(self) -> None:
        """Drop the process in a forked child, because the process belongs to the parent."""
        if self._process is not None:
            self._process.returncode = 0  # so that Popen does not warn when it is deleted
        self._process = None
        self._lock = threading.Lock()


def _answer(process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
    """Return the reply to a request; without a line break at its end if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _plain(value: Any) -> Any:
    """Return a replacement for a value that JSON cannot represent."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else f"<{type(value).__name__}>"


# --- In the process that renders ---------------------------------------------------


class FixedDay(datetime):
    """The date that templates read as today's, for example to write it into a system message.

    It is fixed: with the real date, the token ids of a prompt would change overnight, so a run
    could not be repeated, and an interrupted run could not be resumed on the next day. It is the
    date that the templates of Llama 3.1 and 3.2 write if they are given none.
    """

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "FixedDay":
        """Return 26 July 2024."""
        return cls(2024, 7, 26, tzinfo=tz)


def _serve() -> None:
    from transformers.utils import chat_template_utils

    # A function for the date cannot be passed: transformers passes only plain data to a template.
    chat_template_utils.datetime = FixedDay  # type: ignore[attr-defined]
    _limit_memory()
    # The default actions of both signals end the process, even within one long operation.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_time(request.pop("seconds"))
        reply = _reply(chat_template_utils.render_jinja_template, request, len(line))
        _limit_time(0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


def _limit_time(seconds: float) -> None:
    """Set the limit of CPU time and the limit of wall time; 0 removes both."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS * seconds)


def _limit_memory() -> None:
    if sys.platform == "linux":  # macOS ignores the limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _reply(render: Any, request: dict[str, Any], length: int) -> bytes:
    # A template is code, so it can raise errors of any type.
    try:
        texts, spans = render(**request)
        most = MAX_GROWTH * length + MAX_OWN_CHARACTERS
        if len(texts[0]) > most:
            raise MemoryError(f"its text has {len(texts[0])} characters; the maximum is {most}")
        return json.dumps({"text": texts[0], "spans": spans[0] if spans else []}).encode()
    except MemoryError as error:
        words, kind = str(error), "memory"
    except Exception as error:
        kind = "syntax" if isinstance(error, TemplateSyntaxError) else "raised"
        words = str(error) or type(error).__name__
    return json.dumps({"error": words[:1000], "kind": kind}).encode()


if __name__ == "__main__":
    _serve()
