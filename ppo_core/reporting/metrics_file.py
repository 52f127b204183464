"""The metrics of a run on disk: a line of JSON an update."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_core.data.atomic_files import write_atomically

METRICS_FILE = "metrics.jsonl"
"""Name of the file in `output_dir`."""


class MetricsFile:
    """A line of JSON an update: its number as `update`, and its metrics by their names.

    A line stays once it is written, until a run goes on from a checkpoint: what came after that is
    computed again, and each update has one line, as in a run that was never interrupted.
    """

    def __init__(self, folder: Path) -> None:
        """Write `metrics.jsonl` in `folder`, which is made when it is needed."""
        self.path = folder / METRICS_FILE

    def cut_back(self, updates: int) -> None:
        """Keep the lines of the first `updates` updates: here the run begins, or goes on.

        The file is replaced by another one. A reader that has it open sees that by its inode.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(self.path) if line["update"] <= updates]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def append(self, update: int, metrics: Mapping[str, float]) -> None:
        """Add the line of an update; it is on the disk before a checkpoint can follow it."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": update, **metrics}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file of metrics; none where there is no file.

    The last line lacks its end while it is written, and for good where that was interrupted.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
