"""Progress of long phases: bars on a terminal, lines in a log, and a file for another process."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

from tqdm import tqdm

from ppo_core.io.atomic_files import write_atomically
from ppo_core.io.validation import read_record

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 30.0
"""Minimum seconds between two lines of a phase in a log."""

BAR_DELAY = 5.0
"""A phase that usually ends soon shows its bar only after this number of seconds."""

LINES_PER_PHASE = 10
"""Lines of a long phase in a log: one for each 10 %."""

SECONDS_OF_SILENCE = 600.0
"""Seconds without a line after which a log shows a phase again; see `ProgressBar.keep_showing`."""

_IN_LOGS = (
    "{desc} {percentage:.0f} %: {n_fmt}/{total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left"
    "{postfix}"
)
_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {rate_noinv_fmt}, {elapsed}"

PROGRESS = "PPO_CORE_PROGRESS"
"""Environment variable with the path of a file. This process writes its current phase to the file,
and another process shows the phase on a terminal; see `read_progress`."""

PROGRESS_FILE = "progress.txt"
"""Name of the file that `ProgressFile` writes into the folder of a job."""

SECONDS_BETWEEN_WRITES = 1.0
"""Minimum seconds between two writes of a progress file."""


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


_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` about each bar that begins inside the context, hidden bars too.

    A bar keeps these listeners, and tells them even if another thread advances the bar.
    """
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


def each_pass(items: Sequence[Item], phase: str) -> Iterator[Item]:
    """Yield the items, and tell the listeners before each item that the phase advanced.

    Use this for the passes inside a step, which have no bar of their own.
    """
    for item in items:
        tell_moved(phase)
        yield item
    for listener in _LISTENERS.get():
        listener.ended(phase)


def tell_moved(phase: str) -> None:
    """Tell the listeners that a phase began or advanced."""
    for listener in _LISTENERS.get():
        listener.moved(phase)


class PhaseLines:
    """Listener that refreshes a bar during a long step, with the name of the phase in the step."""

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
            # A resume does not need this file, so a full disk must not end the training here.
            with suppress(OSError):
                self._path.write_text(phase + "\n", encoding="utf-8")
            self._written = now

    def ended(self, phase: str) -> None:
        """Write nothing: the process ends soon, or begins another phase."""


class ProgressBar(tqdm):  # type: ignore[misc]
    """A bar that tells the listeners of this process, and a watching process, about each step."""

    _is_closed = False

    def __init__(self, *, desc: str, in_log: bool, always_ends: bool, **options: Any) -> None:
        """Begin a phase.

        Args:
            desc: name of the phase.
            in_log: show lines of a log, not a bar of a terminal.
            always_ends: show the last line in a log even if the phase is short.
            options: options of `tqdm`.
        """
        self._phase, self._in_log, self._shown = desc, in_log, time.monotonic()
        self._always_ends = always_ends
        self._written = -math.inf
        self._listeners = _LISTENERS.get()
        super().__init__(desc=desc, **options)
        self._tell_moved()
        self._write_progress()

    def update(self, n: float = 1) -> None:
        """Advance by n."""
        self._tell_moved()
        super().update(n)
        self._write_progress()

    def keep_showing(self, inner: str = "") -> None:
        """Show the bar again if it was not shown for a while; call this during a long step.

        `inner` names the phase inside the step.
        """
        # A hidden bar has no `mininterval`.
        if self.disable or inner == self._phase:
            return
        silence = SECONDS_OF_SILENCE if self._in_log else 2 * self.mininterval
        if time.monotonic() - self._shown < silence:
            return
        self.set_description_str(f"{self._phase}, {inner}" if inner else self._phase)
        self.set_description_str(self._phase, refresh=False)

    def display(self, *place: Any, **options: Any) -> Any:
        """Show the bar, see `tqdm`."""
        self._shown = time.monotonic()
        return super().display(*place, **options)

    def close(self) -> None:
        """End the phase; tqdm calls this method again when it deletes the bar."""
        if self._is_closed:
            return
        self._is_closed = True
        for listener in self._listeners:
            listener.ended(self._phase)
        if self._in_log and not self.disable:
            # Show a last line only if the previous line does not show the end.
            self.leave = self.n != self.last_print_n
            if self._always_ends:
                self.delay = 0.0
        super().close()

    def _tell_moved(self) -> None:
        for listener in self._listeners:
            listener.moved(self._phase)

    def _write_progress(self) -> None:
        """Write the phase to the file that PROGRESS names, at most once a second."""
        now, path = time.monotonic(), os.environ.get(PROGRESS)
        if self.disable or not path or now - self._written < SECONDS_BETWEEN_WRITES:
            return
        self._written = now
        progress = PhaseProgress(
            phase=self._phase,
            done=self.n,
            total=self.total,
            unit=self.unit.strip(),
            notes=self.postfix,
        )
        # A run does not fail because the process that watches it has ended.
        with suppress(OSError):
            write_atomically(Path(path), json.dumps(asdict(progress)), durable=False)


@dataclass(frozen=True, kw_only=True)
class PhaseProgress:
    """Progress of a phase."""

    phase: str
    done: float
    total: float | None
    unit: str
    """What is counted, in the singular."""

    notes: str | None
    """Numbers such as the loss, as text."""


def read_progress(path: Path) -> PhaseProgress | None:
    """Return the phase in the file that PROGRESS names; None if the file has none."""
    try:
        return read_record(json.loads(path.read_text(encoding="utf-8")), PhaseProgress)
    except (OSError, ValueError):
        return None


def progress(
    total: int | None, description: str, unit: str, *, hidden: bool = False, delay: float = 0.0
) -> ProgressBar:
    """Return a progress bar: a context manager with the method `update(n)`.

    On a terminal the bar is redrawn in place. A log (of a Metaflow task, for example) has lines
    instead of a bar: a line for each 10 %, at most one in SECONDS_BETWEEN_LINES, and a line at the
    end. `total` is None if the total is unknown. A phase that ends within `delay` seconds shows no
    bar; with a delay, a phase shorter than SECONDS_BETWEEN_LINES has no line in a log.
    """
    if sys.stderr.isatty():
        return ProgressBar(
            total=total,
            desc=description,
            unit=unit,
            disable=hidden,
            delay=delay,
            in_log=False,
            always_ends=True,
        )
    return ProgressBar(
        total=total,
        desc=description,
        unit=f" {unit}",
        file=_OneLineEach(sys.stderr),
        miniters=math.ceil(total / LINES_PER_PHASE) if total else None,
        mininterval=SECONDS_BETWEEN_LINES if total else SECONDS_OF_SILENCE,
        # With tqdm's default of 10 seconds, a slow phase would have too many lines.
        maxinterval=math.inf,
        bar_format=_IN_LOGS if total else _WITHOUT_TOTAL,
        disable=hidden,
        delay=max(delay, SECONDS_BETWEEN_LINES),
        in_log=True,
        always_ends=not delay,
    )
