"""Tables of sample responses, for the terminal, a file, MLflow, TensorBoard and W&B."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback
from transformers.integrations.integration_utils import (
    MLflowCallback,
    TensorBoardCallback,
    WandbCallback,
)

from ppo_core.errors import DataError
from ppo_core.errors.control_characters import remove_controls
from ppo_core.io.atomic_files import explained_writes, write_atomically
from ppo_core.reporting.escaping import as_table
from ppo_core.reporting.metrics_file import COMPLETIONS

COLUMNS = ("query", "response", "score")

NUM_NEWEST = 4
"""Number of responses in the file of the newest samples."""


@dataclass(frozen=True)
class Completions:
    """Queries with their responses and scores.

    Raises:
        DataError: the lists differ in length, or a further column has the name of a standard
            column.
    """

    queries: list[str]
    responses: list[str]
    scores: list[float]
    others: Mapping[str, list[Any]] = field(default_factory=dict)
    """Values of further columns by name, one value per response."""

    def __post_init__(self) -> None:
        """Check the columns."""
        for name, column in self.others.items():
            if len(column) != len(self.scores) or name in COLUMNS:
                raise DataError(
                    f"The column {name!r} has {len(column)} rows. A further column must have "
                    f"{len(self.scores)} rows, and a name other than {', '.join(COLUMNS)}."
                )
        if not len(self.queries) == len(self.responses) == len(self.scores):
            raise DataError(
                f"{len(self.queries)} queries, {len(self.responses)} responses and "
                f"{len(self.scores)} scores differ in number. Give one query and one score for "
                "each response."
            )

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.queries)

    def __iter__(self) -> Iterator[tuple[str, str, float]]:
        """Iterate over rows: query, response, score."""
        return iter(zip(self.queries, self.responses, self.scores, strict=True))

    def by_column(self) -> dict[str, list[Any]]:
        """Return all columns by name, `others` last."""
        columns: dict[str, list[Any]] = {
            "query": self.queries,
            "response": self.responses,
            "score": self.scores,
        }
        return columns | dict(self.others)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows, with all columns."""
        return list(zip(*self.by_column().values(), strict=True))


def print_table(completions: Completions, title: str, *, limit: int) -> None:
    """Print the first `limit` rows on the terminal; markup in texts is printed literally."""
    caption = f"{limit} of {len(completions)}" if limit < len(completions) else None
    table = Table(title=Text(title), caption=caption, show_lines=True)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name == "score" else "left")
    for query, response, score in list(completions)[:limit]:
        table.add_row(
            Text(remove_controls(query)), Text(remove_controls(response)), f"{score:z.4g}"
        )
    # Without colors, because with FORCE_COLOR logs would contain escape codes.
    Console(color_system=None).print(table)


def log_table(
    completions: Completions,
    *,
    step: int,
    callbacks: Iterable[TrainerCallback],
    output_dir: str | Path,
) -> None:
    """Save the table of one step; call this function only in the main process.

    Write `output_dir/completions/step-<step>.jsonl`. Also log the table under the name
    "completions" to the MLflow run, TensorBoard log and W&B run of `callbacks`.
    """
    path = Path(output_dir) / COMPLETIONS / f"step-{step:06d}.jsonl"
    write_completions(completions, path, durable=True)
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            table = as_table(completions.by_column(), completions.rows(), _shown)
            callback.tb_writer.add_text("completions", table, step)
        elif isinstance(callback, WandbCallback) and callback._wandb.run is not None:
            _log_to_wandb(completions, step, callback)
        elif isinstance(callback, MLflowCallback) and callback._ml_flow.active_run() is not None:
            _log_to_mlflow(completions, step, callback)


def _shown(value: Any) -> str:
    return f"{value:z.4g}" if isinstance(value, float) else str(value)


def write_completions(completions: Completions, path: Path, *, durable: bool = False) -> None:
    """Write one JSON object per row; the keys are the names of the columns.

    For `durable` see `write_atomically`.
    """
    names = completions.by_column()
    lines = (dict(zip(names, row, strict=True)) for row in completions.rows())
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with explained_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, durable=durable)


def _log_to_wandb(completions: Completions, step: int, callback: WandbCallback) -> None:
    data = [list(row) for row in completions.rows()]
    table = callback._wandb.Table(columns=list(completions.by_column()), data=data)
    callback._wandb.log({"completions": table, "train/global_step": step})


def _log_to_mlflow(completions: Completions, step: int, callback: MLflowCallback) -> None:
    """Append the rows to the table `completions.json` of the run.

    All steps share this table, because MLflow lists the tables of a run in a single tag with room
    for about 130 tables. When rows are appended, MLflow converts a column of digits to numbers
    ("007" becomes 7); the jsonl file keeps the text.
    """
    table = {"step": [step] * len(completions)} | completions.by_column()
    callback._ml_flow.log_table(table, "completions.json")
