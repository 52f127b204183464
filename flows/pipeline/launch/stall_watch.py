"""Detect that a training hangs or that a judge never replies, and end the process of the step."""

import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from pipeline.launch.process_tree import end_tree, tree
from ppo_core.io.progress_bar import listening

STALL_MINUTES = 30.0
"""Default of the setting `stall_minutes`."""

TIMES_MEDIAN = 20
"""Maximum wait of a phase for its next advance, as a multiple of its median wait."""

RECENT = 1_000
"""Number of latest waits from which the median is computed. A phase may make millions of
advances."""

LOOK_SECONDS = 0.5
"""Seconds between two checks of the clock."""

SUSPENDED_SECONDS = 60.0
"""Longest time between two checks that counts as waiting. A longer time means that this process was
stopped, for example by Ctrl-Z, or that the machine slept."""

ON_HANG_SECONDS = 60.0
"""Maximum time for `on_hang`, which may hang for the same reason as the step."""


class StallWatch:
    """Detects that a phase has made no progress for too long."""

    def __init__(self, minutes: float) -> None:
        """Begin a phase that may wait for `minutes`, or longer if its median wait is long."""
        self._least = 60 * minutes
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._advanced: float | None = None
        self._last = self._checked = time.monotonic()

    def advance(self) -> None:
        """Record that the phase has made an advance, whose wait counts for the limit."""
        now = time.monotonic()
        # The first wait includes the start of the phase, such as loading models.
        if self._advanced is not None:
            self._waits.append(now - self._advanced)
        self._advanced = self._last = now

    def stay_alive(self) -> None:
        """Record a sign of progress between two advances."""
        self._last = time.monotonic()

    def limit(self) -> float:
        """Return the maximum wait for the next advance, in seconds."""
        return max(self._least, TIMES_MEDIAN * median(self._waits or [0.0]))

    def has_stalled(self) -> bool:
        """Return whether the phase has waited longer than its limit; call this every few seconds.

        If this process was suspended since the last call, the wait begins again.
        """
        now = time.monotonic()
        if now - self._checked > SUSPENDED_SECONDS:
            self._last = now
        self._checked = now
        return now - self._last > self.limit()


class _StepWatch:
    """Ends this process if a phase of the step stalls, or the step takes too long.

    `watch` runs in its own thread, because the main thread may hang in code that no signal
    interrupts.
    """

    def __init__(
        self,
        step: str,
        folder: Path,
        stall_minutes: float,
        step_minutes: float,
        on_hang: Callable[[str], None],
    ) -> None:
        self._step, self._folder, self._on_hang = step, folder, on_hang
        self._stall_minutes, self._step_minutes = stall_minutes, step_minutes
        self._started = self._checked = time.monotonic()
        self._phases: dict[str, StallWatch] = {}
        self._over = threading.Event()

    def moved(self, phase: str) -> None:
        """Record that a phase began or advanced."""
        # One look: another thread may end the phase at any moment.
        if watch := self._phases.get(phase):
            watch.advance()
        else:
            self._phases[phase] = StallWatch(self._stall_minutes)

    def ended(self, phase: str) -> None:
        """Stop watching a phase that has ended."""
        self._phases.pop(phase, None)

    def seconds(self) -> float:
        """Return the duration of the step, without suspensions; call this every few seconds."""
        now = time.monotonic()
        if (gap := now - self._checked) > SUSPENDED_SECONDS:
            self._started += gap
        self._checked = now
        return now - self._started

    def stop(self) -> None:
        """End `watch`."""
        self._over.set()

    def watch(self) -> None:
        """Check the clock until `stop` is called or this process is ended."""
        while not self._over.wait(LOOK_SECONDS):
            if self._step_minutes and self.seconds() > 60 * self._step_minutes:
                self._end(
                    f"{self._step}: not over after step_minutes={self._step_minutes:g}. Raise "
                    "step_minutes"
                )
            for phase, watch in list(self._phases.items()):
                if watch.has_stalled():
                    self._end(
                        f"{self._step}: '{phase}' made no progress for {watch.limit() / 60:.3g} "
                        f"minutes (stall_minutes={self._stall_minutes:g}). If this is not an "
                        "error, raise stall_minutes"
                    )

    def _end(self, problem: str) -> None:
        file = self._folder / f"stacks-{self._step}.txt"
        try:
            print(
                f"The run stopped:\n{problem}; what each thread was doing is below and in {file}.",
                file=sys.stderr,
                flush=True,
            )
            # The log also has the stacks, because the file may be lost together with this machine.
            faulthandler.dump_traceback(sys.stderr)
            with suppress(OSError), file.open("w") as stacks:
                faulthandler.dump_traceback(stacks)
            for child in tree(os.getpid())[1:]:
                end_tree(child.pid)
            on_hang = threading.Thread(
                target=self._on_hang, args=(problem,), name="on hang", daemon=True
            )
            on_hang.start()
            on_hang.join(ON_HANG_SECONDS)
        finally:  # also if the disk is full
            os._exit(1)


@contextmanager
def watched_step(
    step: str,
    folder: Path,
    *,
    stall_minutes: float,
    step_minutes: float,
    on_hang: Callable[[str], None] = lambda problem: None,
) -> Iterator[None]:
    """End this process if its step hangs; first write the stack of each thread to `folder`.

    The process ends without leaving its contexts. Therefore `on_hang` is called first with the
    problem, in another thread, for at most ON_HANG_SECONDS.

    A step hangs if a progress bar does not advance for `stall_minutes`, or for 20 times its median
    wait if that is longer. The process also ends if the step takes longer than `step_minutes`,
    without counting the time in which the process was suspended; 0 means no limit. Metaflow retries
    the step if it has `@retry`.
    """
    watch = _StepWatch(step, folder, stall_minutes, step_minutes, on_hang)
    thread = threading.Thread(target=watch.watch, name="stall watch", daemon=True)
    thread.start()
    try:
        with listening(watch):
            yield
    finally:
        watch.stop()
        thread.join()
