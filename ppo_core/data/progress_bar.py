"""Progress bars of long phases, on a terminal or in a log."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0

PROGRESS_FILE = "progress.txt"
"""Name of the file in the folder of a program's job."""

SECONDS_BETWEEN_WRITES = 1.0
"""Minimum seconds between two writes of that file."""


class _OneLineEach:
    """A stream that writes each refresh of a bar as a new line, because logs cannot redraw."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()


class Listener(Protocol):
    """Object that is told about each progress bar of this process."""

    def moved(self, phase: str) -> None:
        """Note that a phase began or advanced; `phase` is the description of its bar."""

    def ended(self, phase: str) -> None:
        """Note that a phase ended."""


_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` about each bar inside the context, hidden bars too."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class ProgressFile:
    """Listener of progress bars that writes the name of the current phase, at most once a second.

    The launcher looks at the file's time.
    """

    def __init__(self, folder: Path) -> None:
        """Write the file in this folder, which exists."""
        self._path = folder / PROGRESS_FILE
        self._written = -math.inf

    def moved(self, phase: str) -> None:
        """Write the phase, whose bar began or advanced."""
        now = time.monotonic()
        if now - self._written >= SECONDS_BETWEEN_WRITES:
            self._path.write_text(phase + "\n", encoding="utf-8")
            self._written = now

    def ended(self, phase: str) -> None:
        """Write nothing: the process ends soon, or begins another phase."""


class ProgressBar(tqdm):  # type: ignore[misc]
    """A bar that tells the listeners of this process about each of its steps."""

    def __init__(self, *, desc: str, **options: Any) -> None:
        """Begin the phase `desc`; the options are those of `tqdm`."""
        self._phase, self._shown = desc, time.monotonic()
        super().__init__(desc=desc, **options)
        self._tell_moved()

    def update(self, n: float = 1) -> None:
        """Advance by n."""
        self._tell_moved()
        super().update(n)

    def keep_showing(self) -> None:
        """Show the bar again if it was not shown for a while; to be called while a step is long."""
        if not self.disable and time.monotonic() - self._shown >= 2 * self.mininterval:
            self.refresh()

    def display(self, *place: Any, **options: Any) -> Any:
        """Show the bar, see `tqdm`."""
        self._shown = time.monotonic()
        return super().display(*place, **options)

    def close(self) -> None:
        """End the phase."""
        for listener in _listeners:
            listener.ended(self._phase)
        super().close()

    def _tell_moved(self) -> None:
        for listener in _listeners:
            listener.moved(self._phase)


def progress(
    total: int | None, description: str, unit: str, *, hidden: bool = False, delay: float = 0.0
) -> ProgressBar:
    """Return a progress bar: a context manager with the method `update(n)`.

    On a terminal the bar is redrawn in place. In a log (of a Metaflow task, for example), the bar
    is written as a line every few seconds. A total of None is not known. A phase that ends within
    `delay` seconds shows no bar.
    """
    if sys.stderr.isatty():
        return ProgressBar(total=total, desc=description, unit=unit, disable=hidden, delay=delay)
    return ProgressBar(
        total=total,
        desc=description,
        unit=unit,
        file=_OneLineEach(sys.stderr),
        mininterval=SECONDS_BETWEEN_LINES,
        ncols=100,
        ascii=True,
        disable=hidden,
        delay=delay,
    )
