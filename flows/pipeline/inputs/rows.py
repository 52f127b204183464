"""Read, check and digest rows of text from a file, a folder or the hub."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ppo_core.config.checks import is_finite
from ppo_core.data.atomic_files import explained_writes
from ppo_core.data.dataset_files import OpenedRows, open_named_split
from ppo_core.data.json_rows import read_json_rows
from ppo_core.errors import DataError, library_errors
from ppo_core.errors.redaction import mask_secrets

MAX_BAD_SHARE = 0.01
"""Maximum fraction of unusable rows; a larger fraction is an error."""

Row = Mapping[str, Any]

Labels = Mapping[str, tuple[type, ...]]
"""Optional columns that are not text columns, and the types of their values."""


@dataclass(frozen=True)
class Rows:
    """The usable rows of one data set."""

    source: str
    """File, folder or hub id, and the selected rows if the data set was split."""

    usable: list[dict[str, Any]]
    """Rows in which every text column is a string and every label is None or of its type. Only a
    required prompt must not be empty."""

    quarantined: list[dict[str, Any]]
    """Unusable rows, each with the row number in the additional column `row`."""

    digest: str
    """Digest of the usable rows."""

    def column(self, name: str) -> list[str]:
        """Return the texts of a column."""
        return [row[name] for row in self.usable]

    def has(self, name: str) -> bool:
        """Return whether the rows have an optional column."""
        return bool(self.usable) and name in self.usable[0]


def read_rows(
    source: str,
    required: Sequence[str],
    optional: Sequence[str] = (),
    labels: Labels | None = None,
    *,
    allow_urls: bool = False,
) -> Rows:
    """Read the named columns of a data set and set unusable rows aside.

    Args:
        source: a jsonl, json or parquet file, a folder of such files, an address of such a file,
            or a hub id. A folder or hub id may name a split after a colon, as in
            `org/name:test`; the default is `train`.
        required: text columns that must exist. A required `prompt` must not be empty; a response
            may be empty, because a model can answer nothing.
        optional: text columns that are read if they exist.
        labels: other columns that are read if they exist. A missing value is None; a value of
            another type or a number that is not finite makes its row unusable.
        allow_urls: whether `source` may be an address.

    Raises:
        DataError: the data set or a column is missing, there is no row, or more than 1 % of the
            rows are unusable.
    """
    data = open_named_split(source, allow_urls=allow_urls)
    columns = _columns_of(data)
    if missing := [name for name in required if name not in columns]:
        raise DataError(
            f"{source} has no column {', '.join(missing)}; its columns are "
            f"{', '.join(columns)}. Rename a column."
        )
    texts = [*required, *(name for name in optional if name in columns)]
    types = {name: kinds for name, kinds in (labels or {}).items() if name in columns}
    usable, quarantined = [], []
    for number, row in enumerate(_rows_of(data, [*texts, *types], source)):
        if _has_texts(row, texts, required) and _has_types(row, types):
            usable.append(row)
        else:
            quarantined.append({"row": number, **row})
    if len(quarantined) > MAX_BAD_SHARE * len(data):
        raise DataError(
            f"{len(quarantined)} of the {len(data)} rows of {source} have an empty prompt, or "
            f"no text in {', '.join(texts)}{_named(types)}; the first such row is "
            f"{quarantined[0]['row']}: {_shorten(quarantined[0])}. At most {MAX_BAD_SHARE:.0%} "
            "of the rows may be unusable. Correct or remove these rows."
        )
    return Rows(source, usable, quarantined, digest_rows(usable))


def held_out(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Split off the last fraction `share` of the rows; both results have at least one row.

    Raises:
        DataError: there are fewer than two rows.
    """
    if len(rows.usable) < 2:
        raise DataError(f"{rows.source} has one row, so none can be held out. Add rows.")
    cut = min(max(round(len(rows.usable) * (1 - share)), 1), len(rows.usable) - 1)
    train, test = rows.usable[:cut], rows.usable[cut:]
    return (
        Rows(f"{rows.source} (first {cut})", train, [], digest_rows(train)),
        Rows(f"{rows.source} (last {len(test)})", test, [], digest_rows(test)),
    )


def digest_rows(rows: Sequence[Row]) -> str:
    """Return a short digest of rows that does not depend on the order of columns."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Return the JSON objects in a file that `write_jsonl` wrote.

    Raises:
        DataError: the file is missing, or a line was changed.
    """
    return read_json_rows(Path(path))


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, with secrets masked.

    A value that JSON lacks, such as a date, becomes its text.

    Raises:
        TrainingError: the file cannot be written.
    """
    with explained_writes(path), path.open("w", encoding="utf-8") as file:
        lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
        file.writelines(mask_secrets(line) + "\n" for line in lines)


def _columns_of(data: OpenedRows) -> list[str]:
    if isinstance(data, Dataset):
        return data.column_names
    return list(dict.fromkeys(name for row in data for name in row))


def _rows_of(data: OpenedRows, columns: Sequence[str], source: str) -> list[dict[str, Any]]:
    """Return these columns of the rows, with None for a missing value."""
    if not isinstance(data, Dataset):
        return [{name: row.get(name) for name in columns} for row in data]
    with library_errors(DataError, f"{source} cannot be read", "Convert the data to UTF-8."):
        return data.select_columns(list(columns)).to_list()


def _has_texts(row: Row, names: Sequence[str], required: Sequence[str]) -> bool:
    texts = all(isinstance(row[name], str) for name in names)
    return texts and ("prompt" not in required or bool(row["prompt"].strip()))


def _has_types(row: Row, types: Labels) -> bool:
    return all(_is_one_of(kinds, row[name]) for name, kinds in types.items())


def _is_one_of(kinds: tuple[type, ...], value: Any) -> bool:
    # bool is a subclass of int, so True would pass as a margin of 1.
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int | float) and not is_finite(value):
        return False
    return value is None or isinstance(value, kinds)


def _named(types: Labels) -> str:
    """Return the label columns and their types as the end of an error message."""
    kinds = {name: " or ".join(kind.__name__ for kind in types[name]) for name in types}
    return "".join(f", or no {kind} in {name}" for name, kind in kinds.items())


def _shorten(row: Row) -> str:
    return ", ".join(f"{key}: {value!r:.40}" for key, value in row.items() if key != "row")
