"""Pass rows to another process in a folder of files."""

import json
from pathlib import Path
from uuid import uuid4

import pyarrow
from datasets import Dataset, disable_progress_bars

from ppo_core.data.rows.read_rows import Rows
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE
from ppo_core.io.atomic_files import explained_writes, write_atomically

_TABLE, _FACTS = "rows.arrow", "rows.json"


def write_rows(rows: Rows, folder: Path) -> None:
    """Create a folder, and write rows into it.

    Raises:
        TrainingError: a file cannot be written, for example because the disk is full.
    """
    with explained_writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Rename a complete file, because several machines may write it while others read it.
        unfinished = folder / f".{_TABLE}.{uuid4().hex}"
        try:
            with (
                unfinished.open("wb") as file,
                pyarrow.ipc.new_stream(file, rows.table.features.arrow_schema) as table,
            ):
                for batch in rows.table.with_format("arrow").iter(ROWS_AT_ONCE):
                    table.write_table(batch)
            unfinished.replace(folder / _TABLE)
        finally:
            unfinished.unlink(missing_ok=True)
        stays = {"table", "left_out_files"}
        facts = {name: value for name, value in vars(rows).items() if name not in stays}
        write_atomically(folder / _FACTS, json.dumps(facts))


def read_written_rows(folder: Path) -> Rows:
    """Return the rows that `write_rows` wrote, mapped into memory."""
    disable_progress_bars()
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    return Rows(table=Dataset.from_file(str(folder / _TABLE)), **facts)
