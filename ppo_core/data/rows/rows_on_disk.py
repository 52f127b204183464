"""Pass rows to another process in a folder of files."""

import json
from fractions import Fraction
from pathlib import Path

import pyarrow
from datasets import Dataset, disable_progress_bars

from ppo_core.data.rows.read_rows import Rows
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE
from ppo_core.io.atomic_files import explained_writes, replacing, write_atomically

_TABLE, _FACTS = "rows.arrow", "rows.json"


def write_rows(rows: Rows, folder: Path) -> None:
    """Create a folder, and write rows into it.

    Raises:
        TrainingError: a file cannot be written, for example because the disk is full.
    """
    with explained_writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # A complete file is renamed, because several machines may write it while others read it.
        with (
            replacing(folder / _TABLE, durable=False) as unfinished,
            unfinished.open("wb") as file,
            pyarrow.ipc.new_stream(file, rows.table.features.arrow_schema) as table,
        ):
            for batch in rows.table.with_format("arrow").iter(ROWS_AT_ONCE):
                table.write_table(batch)
        stays = {"table", "left_out_files"}
        facts = {name: value for name, value in vars(rows).items() if name not in stays}
        write_atomically(folder / _FACTS, json.dumps(facts | {"used": str(rows.used)}))


def read_written_rows(folder: Path) -> Rows:
    """Return the rows that `write_rows` wrote, mapped into memory."""
    disable_progress_bars()
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    facts["used"] = Fraction(facts["used"])
    return Rows(table=Dataset.from_file(str(folder / _TABLE)), **facts)
