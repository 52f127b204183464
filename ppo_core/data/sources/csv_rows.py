"""Read rows from CSV files."""

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from ppo_core.data.sources.compression import open_data_file
from ppo_core.data.sources.raw_row import RawRow
from ppo_core.errors import DataError, library_errors


def read_csv_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a CSV file in UTF-8 with a header; each value is a text.

    Raises:
        DataError: the file cannot be read, is not UTF-8, a value has over 128 KiB, two columns have
            one name, or a row has another number of values than the header.
    """
    move = "Write a header and one row on each line, in UTF-8 and separated by commas."
    with (
        library_errors(DataError, f"'{path}' cannot be read as CSV", move),
        open_data_file(path) as file,
        TextIOWrapper(file, "utf-8-sig", newline="") as text,
    ):
        lines = csv.reader(text, strict=True)
        header = next(lines, [])
        if len(set(header)) < len(header):
            raise ValueError(f"two of its columns {header} have one name")
        for values in filter(None, lines):
            if len(values) != len(header):
                raise ValueError(
                    f"line {lines.line_num} has {len(values)} values for {len(header)} columns"
                )
            yield dict(zip(header, values, strict=True))
