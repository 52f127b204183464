"""Read rows from CSV and TSV files."""

import csv
from collections import Counter
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from ppo_core.data.sources.compression import open_data_file
from ppo_core.data.sources.raw_row import RawRow
from ppo_core.errors import DataError, library_errors


def read_csv_rows(path: Path, *, delimiter: str = ",") -> Iterator[RawRow]:
    """Yield the rows of a CSV or TSV file in UTF-8 with a header; each value is a text.

    Raises:
        DataError: the file cannot be read or is not UTF-8, a value has more than 131,072
            characters, two columns have the same name, or a row has more or fewer values than the
            header.
    """
    form, separators = ("TSV", "tabs") if delimiter == "\t" else ("CSV", "commas")
    move = (
        "Write the header on the first line and one row on each further line, in UTF-8, with "
        f"values of at most 131,072 characters, separated by {separators}."
    )
    with (
        library_errors(DataError, f"'{path}' cannot be read as {form}", move),
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
