"""Progress bars of long phases, on a terminal or in a log."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 5.0

PROGRESS_FILE = "progress.txt"
"""Name of the file that `ProgressFile` writes into the folder of a job."""

SECONDS_BETWEEN_WRITES = 1.0
"""Minimum seconds between two writes of the progress file."""


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


def each_pass(items: Sequence[Item], phase: str) -> Iterator[Item]:
    """Yield the items, and tell the listeners before each item that the phase advanced.

    Use this for the passes inside a step, which have no bar of their own.
    """
    for item in items:
        tell_moved(phase)
        yield item
    for listener in _listeners:
        listener.ended(phase)


def tell_moved(phase: str) -> None:
    """Tell the listeners that a phase began or advanced."""
    for listener in _listeners:
        listener.moved(phase)


class PhaseLines:
    """Listener that refreshes a bar during a long step, and adds the phase inside the step."""

    def __init__(self, bar: "ProgressBar") -> None:
        """Take the bar."""
        self._bar = bar

    def moved(self, phase: str) -> None:
        """Show the bar with the phase, unless the phase is the bar's own."""
        self._bar.keep_showing(phase)

    def ended(self, phase: str) -> None:
        """Show nothing: the next phase begins."""


class ProgressFile:
    """Listener of progress bars that writes the name of the current phase, at most once a second.

    The launcher checks that this file changes, and so detects a process that makes no progress.
    """

    def __init__(self, folder: Path) -> None:
        """Write the file into `folder`, which exists."""
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
        """Begin the phase `desc`; the options go to `tqdm`."""
        self._phase, self._shown = desc, time.monotonic()
        super().__init__(desc=desc, **options)
        tell_moved(desc)

    def update(self, n: float = 1) -> None:
        """Advance by n."""
        tell_moved(self._phase)
        super().update(n)

    def keep_showing(self, inner: str = "") -> None:
        """Show the bar again if it was not shown for a while; call this during a long step.

        `inner` names the phase inside the step.
        """
        # A hidden bar has no `mininterval`.
        if self.disable or inner == self._phase:
            return
        if time.monotonic() - self._shown < 2 * self.mininterval:
            return
        self.set_description_str(f"{self._phase}, {inner}" if inner else self._phase)
        self.set_description_str(self._phase, refresh=False)

    def display(self, *place: Any, **options: Any) -> Any:
        """Show the bar, see `tqdm`."""
        self._shown = time.monotonic()
        return super().display(*place, **options)

    def close(self) -> None:
        """End the phase."""
        for listener in _listeners:
            listener.ended(self._phase)
        super().close()


def progress(
    total: int | None, description: str, unit: str, *, hidden: bool = False, delay: float = 0.0
) -> ProgressBar:
    """Return a progress bar: a context manager with the method `update(n)`.

    On a terminal the bar is redrawn in place. In a log (of a Metaflow task, for example), the bar
    is written as a line every few seconds. `total` is None if the total is unknown. A phase that
    ends within `delay` seconds shows no bar.
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
