"""Show on a terminal how far a run is: one panel that is redrawn in place."""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

from ppo_core.errors.control_characters import escape_controls
from ppo_core.io.progress_bar import read_progress

WIDTH = 100
"""Columns of the panel."""


class LivePanel:
    """The step of a run, its progress, the time left, score and KL, and the last warning."""

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
        self._run, self._steps, self._earlier, self._file = run, steps, earlier, progress_file
        self._step = steps[0]
        self._started = time.monotonic()
        self._begun = time.time()
        self._phase = ""
        self._warning = ""
        # rich draws the panel in a thread of its own, and in this one before it prints a line.
        self._lock = threading.RLock()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}", markup=False),
            TextColumn("{task.fields[notes]}", markup=False),
            # Two updates of PPO may be minutes apart.
            speed_estimate_period=3600.0,
        )
        self._task: TaskID | None = None

    def start_step(self, step: str) -> None:
        """Show the next step, or another attempt of the same step."""
        with self._lock:
            self._step = step
            self._started, self._begun = time.monotonic(), time.time()
            self._end_phase()

    def warn(self, line: str) -> None:
        """Show a line as the last warning."""
        self._warning = line

    def __rich__(self) -> RenderableType:
        """Return the panel as it is now; the file is read again."""
        with self._lock:
            return self._draw()

    def _draw(self) -> Panel:
        self._read_progress()
        seconds = time.monotonic() - self._started
        number = self._steps.index(self._step) + 1
        parts: list[RenderableType] = [
            Text(f"Step {number} of {len(self._steps)}, {self._step}, {as_clock(seconds)}"),
            Text(self._describe_time_left(seconds)),
        ]
        if self._task is not None:
            parts.insert(1, self._bar)
        if self._warning:
            # One line: the log has the whole warning.
            parts.append(Text(self._warning, no_wrap=True, overflow="ellipsis"))
        return Panel(Group(*parts), title=Text(f"Run {self._run}"), title_align="left", width=WIDTH)

    def _read_progress(self) -> None:
        found = read_progress(self._file)
        # The file may still have the last phase of the step before.
        if found is None or self._file.stat().st_mtime < self._begun:
            return
        if found.phase != self._phase:
            self._end_phase()
            self._phase = found.phase
        if not found.total:
            return
        shown: dict[str, Any] = {
            "completed": found.done,
            "unit": escape_controls(found.unit),
            "notes": escape_controls(found.notes or ""),
        }
        if self._task is None:
            name = escape_controls(found.phase)
            self._task = self._bar.add_task(name, total=found.total, **shown)
        else:
            self._bar.update(self._task, total=found.total, **shown)

    def _end_phase(self) -> None:
        self._phase = ""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def _describe_time_left(self, seconds: float) -> str:
        """Return the rate, and the time left for the step and for the run, as far as known."""
        rate, left = None, None
        if self._task is not None:
            (task,) = self._bar.tasks
            rate, left = task.speed, task.time_remaining
        parts = [] if rate is None else [f"{rate:,.1f} {self._bar.tasks[0].fields['unit']}s/s"]
        if left is None and self._step in self._earlier:
            left = max(self._earlier[self._step] - seconds, 0.0)
        parts.append(f"step: {'unknown' if left is None else as_clock(left)} left")
        later = self._steps[self._steps.index(self._step) + 1 :]
        if left is None or not self._earlier:
            parts.append("run: unknown, as no run has ended here yet")
        else:
            rest = left + sum(self._earlier.get(step, 0.0) for step in later)
            parts.append(f"run: {as_clock(rest)} left, if the next steps take as long as last time")
        return ", ".join(parts)


def as_clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
