"""When checkpoints are written: at once, or by a thread while the training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class AsyncWriter:
    """Writes one checkpoint at a time.

    In the background `save` returns at once, and what goes wrong is raised by the next `save` or
    `wait`. The interpreter does not end before the thread has.
    """

    def __init__(self, *, in_background: bool) -> None:
        """Start no thread before the first checkpoint."""
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._pending: Future[None] | None = None

    def save(self, write: Callable[[], None]) -> None:
        """Write, after the one before has been written.

        Raises:
            TrainingError: it, or the one before, could not be written.
        """
        self.wait()
        if self._thread is None:
            write()
        else:
            self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Return when the last checkpoint is in its place.

        Raises:
            TrainingError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
