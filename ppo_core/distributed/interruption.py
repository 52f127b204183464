"""Treat SIGTERM as a request to save and stop; spot instances and schedulers send SIGTERM."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 75
"""Exit code of an interrupted process that can resume: EX_TEMPFAIL of sysexits.h."""


class Interruption:
    """A context in which SIGTERM sets `requested` instead of ending the process.

    The context works only in the main thread, because Python delivers signals only there.
    """

    def __init__(self) -> None:
        """Start with `requested` False."""
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> Self:
        """Install the handler of SIGTERM, and reset `requested`."""
        self.requested = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous handler of SIGTERM."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
