"""Greedy answers to a few training prompts before, during and after PPO."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.inputs.json_lines import read_records
from pipeline.results.step_records import WatchedPrompt
from ppo_core.errors import DataError
from ppo_core.reporting.metrics_file import COMPLETIONS


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """A row of a file that `write_completions` wrote."""

    query: str
    response: str
    score: float


def read_watched(folder: Path) -> list[WatchedPrompt]:
    """Return the prompts that a training watches, with the answers so far; [] without answers.

    `folder` is the `output_dir` of the training.

    Raises:
        DataError: a file is damaged.
    """
    tables = {
        int(number): read_records(path, SampleRow)
        for path in sorted((folder / COMPLETIONS).glob("step-*.jsonl"))
        if (number := path.stem.removeprefix("step-")).isdecimal()
    }
    if len({len(rows) for rows in tables.values()}) > 1:
        raise DataError(f"The files in '{folder / COMPLETIONS}' differ in their number of rows.")
    return [
        WatchedPrompt(
            prompt=rows[0].query,
            answers={
                update: (row.response, row.score) for update, row in zip(tables, rows, strict=True)
            },
        )
        for rows in zip(*tables.values(), strict=True)
    ]
