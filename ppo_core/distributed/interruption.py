"""SIGTERM, as spot instances and schedulers send it: stop soon, and keep what was done."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

EXIT_CODE = 75
"""Of a process that was told to stop and can go on later: EX_TEMPFAIL of sysexits.h."""


class Interruption:
    """Inside of its `with`, SIGTERM does not end the process but sets `requested`.

    Python hands signals to the main thread alone: in another one SIGTERM stays what it was.
    """

    def __init__(self) -> None:
        """Nothing is requested yet."""
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> None:
        """From here on SIGTERM is a request; one that was answered before counts no longer."""
        self.requested = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._request)

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """From here on SIGTERM is what it was before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
