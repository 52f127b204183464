"""Write checkpoints at once, or in a thread while training continues."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class AsyncWriter:
    """Writes one checkpoint at a time.

    In the background `save` returns at once, and an error is raised by the next `save` or `wait`.
    The interpreter does not exit before the thread has finished.
    """

    def __init__(self, *, in_background: bool) -> None:
        """Create the writer; a thread starts with the first checkpoint."""
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._pending: Future[None] | None = None

    def save(self, write: Callable[[], None]) -> None:
        """Wait for the previous checkpoint, then call write, which writes the next one.

        Raises:
            TrainingError: this checkpoint or the previous one could not be written.
        """
        self.wait()
        if self._thread is None:
            write()
        else:
            self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Return when the last checkpoint is complete.

        Raises:
            TrainingError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
