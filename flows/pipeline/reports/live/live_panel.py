"""Show the progress of a run on a terminal, in a panel that is redrawn in place."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress import Task
from rich.text import Text

from pipeline.reports.live.followed_phase import FollowedPhase, as_clock, describe_speed

WIDTH = 100
"""Columns of the panel."""


class LivePanel:
    """Panel with the step of a run, its progress, time left, score and KL, and the last warning."""

    def __init__(
        self, run: str, steps: Sequence[str], earlier: Mapping[str, float], progress_file: Path
    ) -> None:
        """Show a run that has not started.

        Args:
            run: id of the run.
            steps: names of the steps in their order.
            earlier: seconds that the steps took in the last run; may be empty.
            progress_file: the file to which the steps write their progress.
        """
        self._run, self._steps, self._earlier = run, steps, earlier
        self._step = steps[0]
        self._started = time.monotonic()
        self._warning = ""
        # rich draws the panel in its own thread, and in the main thread before it prints a line.
        self._lock = threading.RLock()
        self._phase = FollowedPhase(progress_file)

    def start_step(self, step: str) -> None:
        """Show the next step, or another attempt of the same step."""
        with self._lock:
            self._step, self._started = step, time.monotonic()
            self._phase.begin()

    def warn(self, line: str) -> None:
        """Show a line as the last warning."""
        self._warning = line

    def __rich__(self) -> RenderableType:
        """Read the progress file, and return the current panel."""
        with self._lock:
            return self._draw()

    def _draw(self) -> Panel:
        phase = self._phase.read()
        seconds = time.monotonic() - self._started
        number = self._steps.index(self._step) + 1
        parts: list[RenderableType] = [
            Text(f"Step {number} of {len(self._steps)}, {self._step}, {as_clock(seconds)}"),
            Text(self._describe_time_left(seconds, phase)),
        ]
        if phase is not None:
            parts.insert(1, self._phase.bar)
        if self._warning:
            # The panel shows one line; the log has the whole warning.
            parts.append(Text(self._warning, no_wrap=True, overflow="ellipsis"))
        return Panel(Group(*parts), title=Text(f"Run {self._run}"), title_align="left", width=WIDTH)

    def _describe_time_left(self, seconds: float, phase: Task | None) -> str:
        """Return the rate if it is known, and the time left for the phase, the step and the run."""
        parts = [] if phase is None else describe_speed(phase)
        if phase is not None and phase.time_remaining is not None:
            parts.append(f"phase: {as_clock(phase.time_remaining)} left")
        left = self._earlier.get(self._step, 0.0) - seconds
        if left <= 0:  # The step takes longer than in the last run, or there was no last run.
            return ", ".join([*parts, "step and run: time left unknown"])
        later = self._steps[self._steps.index(self._step) + 1 :]
        rest = left + sum(self._earlier.get(step, 0.0) for step in later)
        parts.append(f"step: {as_clock(left)} left")
        parts.append(f"run: {as_clock(rest)} left, if all steps take as long as in the last run")
        return ", ".join(parts)
