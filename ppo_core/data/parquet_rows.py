"""Read rows from Parquet files."""

from pathlib import Path

from datasets import Dataset
from datasets.table import InMemoryTable
from pyarrow.parquet import ParquetFile

from ppo_core.config.text_files import open_regular_file
from ppo_core.errors import DataError, library_errors

MAX_ROWS_PER_BYTE = 100
"""Maximum number of rows for each byte of a file. A damaged file, or one that was made to exhaust
the memory, claims more."""


def read_parquet_rows(path: Path) -> Dataset:
    """Return the rows of a Parquet file, in memory.

    Types that `datasets` notes in a file are ignored: some make it load other files and addresses.

    Raises:
        DataError: the file cannot be read, is damaged, or holds text that is not UTF-8.
    """
    move = "Write the file again, or name another."
    with (
        library_errors(DataError, f"'{path}' cannot be read as Parquet", move),
        open_regular_file(path) as file,
        ParquetFile(file) as parquet,
    ):
        size, rows = path.stat().st_size, parquet.metadata.num_rows
        if rows > MAX_ROWS_PER_BYTE * size:
            raise ValueError(f"its {size} bytes claim to hold {rows} rows")
        table = parquet.read()
        table.validate(full=True)
        if table.num_rows != rows:
            raise ValueError(f"it claims {rows} rows but holds {table.num_rows}")
        if len(set(table.column_names)) < len(table.column_names):
            raise ValueError(f"two of its columns {table.column_names} have one name")
        return Dataset(InMemoryTable(table.replace_schema_metadata(None)))
