"""Read rows from Parquet files."""

from collections.abc import Iterator
from pathlib import Path

from pyarrow.parquet import ParquetFile

from ppo_core.data.sources.raw_row import ROWS_AT_ONCE, RawRow
from ppo_core.errors import DataError, library_errors
from ppo_core.io.text_files import open_regular_file

MAX_ROWS_PER_BYTE = 100
"""Maximum number of rows for each byte of a file. A file that claims more rows is damaged, or was
made to exhaust the memory."""


def read_parquet_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a Parquet file.

    The feature types that `datasets` stores in a file are ignored, because some of these types make
    `datasets` load other files and addresses.

    Raises:
        DataError: the file cannot be read, is damaged, contains text that is not UTF-8, or has two
            columns with the same name.
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
        names = parquet.schema_arrow.names
        if len(set(names)) < len(names):
            raise ValueError(f"two of its columns {names} have the same name")
        read = 0
        for batch in parquet.iter_batches(ROWS_AT_ONCE):
            batch.validate(full=True)
            read += batch.num_rows
            yield from batch.to_pylist()
        if read != rows:
            raise ValueError(f"it claims {rows} rows but holds {read}")
