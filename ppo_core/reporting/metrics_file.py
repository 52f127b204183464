"""The metrics of a run on disk, at most one line of JSON per update."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ppo_core.io.atomic_files import explained_writes, write_atomically
from ppo_core.io.text_files import parse_json
from ppo_core.io.validation import Count, read_record

METRICS_FILE = "metrics.jsonl"
"""Name of the file in `output_dir`."""

SELF_CHECK_FILE = "self-check.json"
"""Name of the file in `output_dir` with the record of a run's `SelfCheck`."""

NEWEST_SAMPLES_FILE = "newest-samples.jsonl"
"""Name of the file in `output_dir` with some responses of the last PPO update; the next update
replaces the file."""

COMPLETIONS = "completions"
"""Subfolder of `output_dir` for the tables of samples, and their name in integrations."""

UPDATE = "update"
"""Key of the update's number in a line."""

SPREAD = {"p10": 0.1, "p90": 0.9}
"""End of a metric's name -> the quantile over the responses that the metric measures."""

logger = logging.getLogger(__name__)


class MetricsFile:
    """A file with JSON lines for some or all updates: the number as `update`, and the metrics.

    A run that resumes from a checkpoint computes all later updates again. The run therefore removes
    the lines of these updates, so that no update has two lines.
    """

    def __init__(self, folder: Path) -> None:
        """Use `metrics.jsonl` in `folder`; `cut_back` creates the folder."""
        self.path = folder / METRICS_FILE

    def cut_back(
        self,
        updates: int,
        history: Mapping[int, Mapping[str, float]] | None = None,
        *,
        first: int = 1,
        every: int = 1,
    ) -> None:
        """Keep only the lines of the first `updates` updates; call when the run starts or resumes.

        The file has a line for update `first`, and for every `every`-th update after `first`.

        Damaged or missing lines are restored from `history`, which has metrics by update. A warning
        counts the damaged lines, and lists the dropped and the restored updates. The file is
        replaced, so a reader of the old file can notice the new inode.

        Raises:
            TrainingError: the file cannot be read or written.
        """
        with explained_writes(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self.path.read_bytes() if self.path.exists() else b""
            found = _lines_by_update(content)
            history = history or {}
            numbered = range(first, updates + 1, every)
            lines = [
                found.get(update) or {UPDATE: update, **history[update]}
                for update in numbered
                if update in found or update in history
            ]
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        kept = {line[UPDATE] for line in lines}
        repairs = {
            "dropped damaged lines": len(content.splitlines()) - len(_complete_lines(content)),
            "dropped updates": _ranges(found.keys() - kept),
            "restored updates": _ranges(kept - found.keys()),
            "updates without metrics": _ranges({*numbered} - kept),
        }
        if any(repairs.values()):
            made = "; ".join(f"{what}: {which}" for what, which in repairs.items() if which)
            logger.warning("'%s' was cut back to update %d. %s.", self.path, updates, made)

    def append(self, update: int, metrics: Mapping[str, float]) -> None:
        """Append the line of an update, and sync the file, so no checkpoint is ahead of the file.

        Raises:
            TrainingError: the line cannot be written. A partial line is ignored by readers.
        """
        with explained_writes(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({UPDATE: update, **metrics}) + "\n")
            file.flush()
            os.fsync(file.fileno())


class _Line(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, float]
    update: Count


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file as dicts, or [] if there is no file.

    The last line is incomplete during a write, or after an interrupted write. Damaged lines are
    left out; a run that resumes repairs the file.
    """
    return _complete_lines(path.read_bytes()) if path.exists() else []


def read_line(line: bytes) -> dict[str, Any] | None:
    """Return the number and the metrics of an update; None if the line is damaged or incomplete."""
    try:
        values = parse_json(line)
        read_record(values, _Line)
    except ValueError:
        return None
    return values if len(values) > 1 and line.endswith(b"\n") else None


def _complete_lines(content: bytes) -> list[dict[str, Any]]:
    lines = (read_line(line) for line in content.splitlines(keepends=True))
    return [line for line in lines if line is not None]


def _lines_by_update(content: bytes) -> dict[int, dict[str, Any]]:
    """Return the first line of each update; a second line would be from another run."""
    found: dict[int, dict[str, Any]] = {}
    for line in _complete_lines(content):
        found.setdefault(line[UPDATE], line)
    return found


def _ranges(numbers: set[int]) -> str:
    """Return numbers as text such as "1-3, 7"."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
