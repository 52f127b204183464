"""The metrics of a run on disk, as one line of JSON per update."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_core.data.atomic_files import write_atomically

METRICS_FILE = "metrics.jsonl"
"""Name of the file in `output_dir`."""


class MetricsFile:
    """A file with one JSON object per update: its number as `update`, and its metrics by name.

    A run that resumes from a checkpoint computes all later updates again. It therefore removes
    the lines of these updates, so that each update has exactly one line.
    """

    def __init__(self, folder: Path) -> None:
        """Use `metrics.jsonl` in `folder`; `cut_back` creates the folder."""
        self.path = folder / METRICS_FILE

    def cut_back(self, updates: int) -> None:
        """Keep only the lines of the first `updates` updates; call when the run starts or resumes.

        The file is replaced, so a reader with the open file can notice the new inode.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(self.path) if line["update"] <= updates]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def append(self, update: int, metrics: Mapping[str, float]) -> None:
        """Append the line of an update, and sync the file to disk before a checkpoint is saved."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": update, **metrics}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file as dicts, or [] if there is no file.

    The last line is incomplete during a write, or after an interrupted write.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
