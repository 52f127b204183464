"""Log to an MLflow run through the journal on disk, so that no step waits for MLflow."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.tracking.journal import Journal
from pipeline.tracking.mlflow_facts import MAX_TAG_CHARACTERS
from ppo_core.errors.redaction import mask_secrets, mask_values
from ppo_core.io.text_files import parse_strict_json
from ppo_core.reporting.escaping import as_line, as_markdown

DESCRIPTION = "mlflow.note.content"
"""Tag of a run that MLflow shows as its description, in Markdown."""

FIGURES = "figures.json"
"""Artifact with a table of all figures of a run."""

HEADLINES = re.compile(
    r"win_rate/.+/rate|win_rate/ppo_vs_(champion|sft)/(low|high)|kl/ppo|"
    r"reward_model/(accuracy|best_of_4)|cost/(gpu_hours|price)"
)
"""Names of the figures that are metrics, too, so that MLflow can sort and compare runs by them."""

LOGGED_ARTIFACTS = "mlflow.loggedArtifacts"
"""Tag that lists the artifacts that MLflow shows as tables."""


class RunLog:
    """Logs to one run of MLflow; logging equal values again changes nothing.

    Secrets in tags and texts are masked, because models and judges wrote some of the texts.
    """

    def __init__(self, journal: Journal, run: str) -> None:
        """Log to the MLflow run with the id `run` through `journal`."""
        self.journal = journal
        self.run = run

    def log_metrics(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics of `step`; None means the full run. A step keeps its first values."""
        self.journal.log_metrics(self.run, values, step)

    def log_figures(self, values: Mapping[str, float]) -> None:
        """Add figures of the full run to the table FIGURES; log the HEADLINES also as metrics.

        MLflow draws a bar chart for each metric with a single value, so only a few are metrics.
        """
        self.log_metrics({name: one for name, one in values.items() if HEADLINES.fullmatch(name)})
        rows = self._figures() | dict(values)
        table = [{"figure": name, "value": value} for name, value in sorted(rows.items())]
        self.log_table(table, FIGURES)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        for key, value in tags.items():
            self.journal.set_tag(self.run, key, mask_secrets(value))

    def describe(self, outcome: str, sentences: Sequence[str] = ()) -> None:
        """Set the description of the run, see `description`."""
        self.set_tags({DESCRIPTION: description(outcome, sentences)})

    def set_status(self, status: Literal["RUNNING", "FINISHED"]) -> None:
        """Set the status of the run; FINISHED ends the run."""
        self.journal.set_status(self.run, status)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Log a file or folder into an artifact folder; `path` must exist until it is sent."""
        self.journal.add_file(self.run, path, folder)

    def log_text(self, text: str, artifact: str) -> None:
        """Log text or HTML; `artifact` is the path among the artifacts."""
        self.journal.write_file(self.run, artifact, mask_secrets(text).encode())

    def log_json(self, value: Any, artifact: str, *, indent: int | None = 2) -> None:
        """Log a value as JSON."""
        text = json.dumps(mask_values(value), indent=indent)
        self.journal.write_file(self.run, artifact, text.encode())

    def log_table(self, rows: Sequence[Mapping[str, Any]], artifact: str) -> None:
        """Log rows with equal columns as a table.

        `mlflow.log_table` appends to an existing table, so a retried step would duplicate rows.
        This method overwrites the file, and sets the same tag as `mlflow.log_table`.
        """
        columns = list(rows[0]) if rows else []
        data = [[_cell(row[column]) for column in columns] for row in rows]
        self.log_json({"columns": columns, "data": data}, artifact, indent=None)
        tables = _logged_tables(self.journal.tag(self.run, LOGGED_ARTIFACTS))
        table = {"path": artifact, "type": "table"}
        if table not in tables:
            self.set_tags({LOGGED_ARTIFACTS: json.dumps([*tables, table])})

    def _figures(self) -> dict[str, float | None]:
        """Return the figures logged so far."""
        path = self.journal.path_of(self.run, FIGURES)
        try:
            return read_figures(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # no figures were logged yet
            return {}
        except ValueError as error:  # for example, a power cut has emptied the file
            print(
                f"Warning: {path} is damaged: {error}. The figures that were logged before are "
                "therefore missing in MLflow.",
                flush=True,
            )
            return {}


def description(outcome: str, sentences: Sequence[str] = ()) -> str:
    """Return the description of a run in Markdown: its outcome, and a list of sentences.

    Outcome and sentences are escaped. The list ends before the first sentence with which the text
    would exceed the maximum length of a tag.
    """
    text = f"**{as_markdown(outcome)}**\n"
    for sentence in sentences:
        line = f"\n- {as_line(sentence)}"
        if len(text) + len(line) > MAX_TAG_CHARACTERS:
            break
        text += line
    return text.rstrip()


def read_figures(text: str) -> dict[str, float | None]:
    """Return name -> value from the text of a table FIGURES; a value that is not finite is None.

    Raises:
        ValueError: the text is not such a table.
    """
    match parse_strict_json(text):
        case {"columns": ["figure", "value"], "data": list(rows)} if all(map(_is_figure, rows)):
            return dict(rows)
    raise ValueError("it is not a table of figures")


def _is_figure(row: Any) -> bool:
    """Return whether the row of a table is a name and a value."""
    match row:
        case [str(), float() | int() | None]:
            return True
    return False


def _logged_tables(tag: str | None) -> list[Any]:
    """Return the artifacts in the tag; an empty list if the tag is missing or damaged."""
    try:
        tables = parse_strict_json(tag or "[]")
    except ValueError:
        return []
    return tables if isinstance(tables, list) else []


def _cell(value: Any) -> Any:
    """Return a value, or None for NaN and infinity, which are not valid JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
