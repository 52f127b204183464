"""Write checkpoints in the calling thread, or in a background thread while training continues."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class AsyncWriter:
    """Writes one checkpoint at a time.

    With `in_background`, `save` returns at once, and the next `save` or `wait` raises an error of
    the thread. The interpreter does not exit before the thread has finished.
    """

    def __init__(self, *, in_background: bool) -> None:
        """Create the writer; the background thread starts with the first checkpoint."""
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._pending: Future[None] | None = None

    def save(self, write: Callable[[], None]) -> None:
        """Wait for the previous checkpoint, then call `write`, which writes the next checkpoint.

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
            TrainingError: the checkpoint could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
