"""Read rows from CSV and TSV files."""

import csv
from collections import Counter
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from ppo_core.data.sources.compression import open_data_file
from ppo_core.data.sources.raw_row import RawRow
from ppo_core.errors import DataError, library_errors


def read_csv_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a CSV file in UTF-8 with a header; each value is a text.

    Raises:
        DataError: see `_read`.
    """
    return _read(path, ",", "CSV", "commas")


def read_tsv_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a TSV file: a CSV file with tabs instead of commas.

    Raises:
        DataError: see `_read`.
    """
    return _read(path, "\t", "TSV", "tabs")


def _read(path: Path, delimiter: str, name: str, separators: str) -> Iterator[RawRow]:
    """Yield the rows of a file whose values are separated by a delimiter.

    Raises:
        DataError: the file cannot be read or is not UTF-8, a value has more than 131,072
            characters, two columns have the same name, or a row has more or fewer values than the
            header.
    """
    move = (
        "Write the header on the first line and one row on each further line, in UTF-8, with "
        f"values separated by {separators}."
    )
    with (
        library_errors(DataError, f"'{path}' cannot be read as {name}", move),
        open_data_file(path) as file,
        TextIOWrapper(file, "utf-8-sig", newline="") as text,
    ):
        lines = csv.reader(text, strict=True, delimiter=delimiter)
        header = next(lines, [])
        if len(set(header)) < len(header):
            (name, _), *_ = Counter(header).most_common(1)
            raise ValueError(f"several columns have the name {name!r}")
        for values in filter(None, lines):
            if len(values) != len(header):
                raise ValueError(
                    f"line {lines.line_num} has {len(values)} values for {len(header)} columns"
                )
            yield dict(zip(header, values, strict=True))
