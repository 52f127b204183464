"""What a step says of its run in MLflow; all of it goes to the journal, so nothing waits."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.tracking.journal import Journal

LOGGED_ARTIFACTS = "mlflow.loggedArtifacts"
"""Tag by which MLflow knows which of the artifacts it shows as tables."""


class RunLog:
    """One run of MLflow, by its id; saying the same again changes nothing."""

    def __init__(self, journal: Journal, run: str) -> None:
        """Write to `journal` what is said of `run`."""
        self.journal = journal
        self.run = run

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Metrics of a step, which stand once logged, or without one figures of the whole run."""
        self.journal.log_metrics(self.run, values, step)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        for key, value in tags.items():
            self.journal.set_tag(self.run, key, value)

    def set_status(self, status: Literal["RUNNING", "FINISHED", "FAILED"]) -> None:
        """Say what the run does; FINISHED and FAILED end it now."""
        self.journal.set_status(self.run, status)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """A file or folder, which has to stay where it is, put into a folder of the artifacts."""
        self.journal.add_file(self.run, path, folder)

    def log_text(self, text: str, artifact: str) -> None:
        """A text or a page; `artifact` is its path among the artifacts, as in all that follow."""
        self.journal.write_file(self.run, artifact, text.encode())

    def log_figure(self, png: bytes, artifact: str) -> None:
        """A PNG file."""
        self.journal.write_file(self.run, artifact, png)

    def log_json(self, value: Any, artifact: str) -> None:
        """A value that JSON can hold."""
        self.log_text(json.dumps(value, indent=2), artifact)

    def log_table(self, rows: Sequence[Mapping[str, Any]], artifact: str) -> None:
        """Rows that all have the columns of the first, shown by MLflow as a table.

        `mlflow.log_table` appends to a table that is there, so a step that is tried again would
        double it; this is the same file and tag, written anew.
        """
        columns = list(rows[0]) if rows else []
        data = [[_cell(row[column]) for column in columns] for row in rows]
        self.log_text(json.dumps({"columns": columns, "data": data}), artifact)
        tables = json.loads(self.journal.tag(self.run, LOGGED_ARTIFACTS) or "[]")
        table = {"path": artifact, "type": "table"}
        if table not in tables:
            self.set_tags({LOGGED_ARTIFACTS: json.dumps([*tables, table])})


def _cell(value: Any) -> Any:
    """A value as the browser reads it, whose JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
