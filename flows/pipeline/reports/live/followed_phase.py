"""Follow the phase that a process writes to a file, and estimate its rate and the time left."""

import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, Task, TaskID, TaskProgressColumn, TextColumn

from ppo_core.errors.control_characters import escape_controls
from ppo_core.io.progress_bar import read_progress


class FollowedPhase:
    """The current phase of a step, as `ProgressBar` writes it to the file that PROGRESS names."""

    def __init__(self, file: Path) -> None:
        """Follow a file, which need not exist yet, and ignore its earlier contents."""
        self._file = file
        self._begun = time.time()
        self._name = ""
        self._task: TaskID | None = None
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}", markup=False),
            TextColumn("{task.fields[notes]}", markup=False),
            # Estimate the rate from the last hour, because two updates of PPO may be minutes apart.
            speed_estimate_period=3600.0,
        )
        """The phase as a bar for a terminal."""

    def begin(self) -> None:
        """Forget the phase of the previous step, and ignore what that step wrote to the file."""
        self._begun = time.time()
        self._end()

    def read(self) -> Task | None:
        """Read the file again; return the phase, or None if there is no phase with a known total.

        The dict `fields` of the phase contains `unit` (the name of what is counted, in the
        singular) and `notes`.
        """
        found = read_progress(self._file)
        if found is not None and self._file.stat().st_mtime >= self._begun:
            if found.phase != self._name:
                self._end()
                self._name = found.phase
            if found.total:
                shown: dict[str, Any] = {
                    "completed": found.done,
                    "unit": escape_controls(found.unit),
                    "notes": escape_controls(found.notes or ""),
                }
                if self._task is None:
                    name = escape_controls(found.phase)
                    self._task = self.bar.add_task(name, total=found.total, **shown)
                else:
                    self.bar.update(self._task, total=found.total, **shown)
        return None if self._task is None else self.bar.tasks[0]

    def _end(self) -> None:
        self._name = ""
        if self._task is not None:
            self.bar.remove_task(self._task)
            self._task = None


def describe_speed(phase: Task) -> list[str]:
    """Return a list with the rate of a phase as text; [] if the rate is not known yet."""
    return [] if phase.speed is None else [f"{phase.speed:,.1f} {plural(phase.fields['unit'])}/s"]


def plural(unit: str) -> str:
    """Return the plural of a unit; a symbol, such as B for bytes, has no plural."""
    return unit if len(unit) == 1 else f"{unit}s"


def as_clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
