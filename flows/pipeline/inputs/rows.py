"""Rows of text from a file, a folder or the hub: read, checked, and named by a digest."""

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetNotFoundError

from ppo_core.data.dataset_files import FORMATS
from ppo_core.errors import DataError

MAX_BAD_SHARE = 0.01
"""Largest share of unusable rows that is set aside rather than refused."""

Row = Mapping[str, Any]

Labels = Mapping[str, tuple[type, ...]]
"""Columns that a data set may have beside its texts, and the types of their values."""


@dataclass(frozen=True)
class Rows:
    """The usable rows of one data set."""

    source: str
    """Where they were read."""

    usable: list[dict[str, Any]]
    """Rows in which every column is a text, and every label of its type or None; only a prompt
    must not be empty."""

    quarantined: list[dict[str, Any]]
    """Rows set aside, each with its row number as `row`."""

    digest: str
    """Digest of the usable rows."""

    def column(self, name: str) -> list[str]:
        """The texts of one column."""
        return [row[name] for row in self.usable]

    def has(self, name: str) -> bool:
        """Whether the rows have an optional column."""
        return bool(self.usable) and name in self.usable[0]


def read_rows(
    source: str,
    required: Sequence[str],
    optional: Sequence[str] = (),
    labels: Labels | None = None,
) -> Rows:
    """Read the named columns of a data set and set unusable rows aside.

    Args:
        source: a jsonl, json or parquet file, a folder of them, or a hub id; the `train` split
            of a hub data set, or the split named after a colon, as in `org/name:test`.
        required: columns that must be there. A required `prompt` must not be empty either; a
            response may be: a model can answer nothing.
        optional: columns that are read if they are there.
        labels: columns that are read if they are there and need not be texts. A value that is
            missing is None; one of another type, or a number that is not finite, makes its row
            unusable.

    Raises:
        DataError: the data set or a column is missing, it is empty, or more than 1 % of its
            rows are unusable.
    """
    data = _load(source)
    if missing := [name for name in required if name not in data.column_names]:
        raise DataError(
            f"{source} has no column {', '.join(missing)}; its columns are "
            f"{', '.join(data.column_names)}. Rename one of them."
        )
    if len(data) == 0:
        raise DataError(f"{source} is empty: it has no row. Name a file with at least one.")
    texts = [*required, *(name for name in optional if name in data.column_names)]
    types = {name: kinds for name, kinds in (labels or {}).items() if name in data.column_names}
    usable, quarantined = [], []
    for number, row in enumerate(_rows_of(data.select_columns([*texts, *types]), source)):
        if _has_texts(row, texts, required) and _has_types(row, types):
            usable.append(row)
        else:
            quarantined.append({"row": number, **row})
    if len(quarantined) > MAX_BAD_SHARE * len(data):
        raise DataError(
            f"{len(quarantined)} of the {len(data)} rows of {source} have an empty prompt, or "
            f"something that is no text in {', '.join(texts)}{_named(types)}; the first is row "
            f"{quarantined[0]['row']}: {_shorten(quarantined[0])}. Up to {MAX_BAD_SHARE:.0%} "
            "would be set aside. Mend or remove them."
        )
    return Rows(source, usable, quarantined, digest_rows(usable))


def held_out(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Split rows into those to train on and the last `share` of them, at least one each.

    Raises:
        DataError: there are fewer than two rows.
    """
    if len(rows.usable) < 2:
        raise DataError(f"{rows.source} has one row: none can be held out. Add rows.")
    cut = min(max(round(len(rows.usable) * (1 - share)), 1), len(rows.usable) - 1)
    train, test = rows.usable[:cut], rows.usable[cut:]
    return (
        Rows(f"{rows.source} (first {cut})", train, [], digest_rows(train)),
        Rows(f"{rows.source} (last {len(test)})", test, [], digest_rows(test)),
    )


def digest_rows(rows: Sequence[Row]) -> str:
    """A short digest of rows, whatever the order of their columns."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """The JSON object of each line, as `write_jsonl` writes them."""
    # Not `splitlines`, for which an answer with U+2028 or U+0085 in it is two lines.
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _rows_of(data: datasets.Dataset, source: str) -> list[dict[str, Any]]:
    try:
        return data.to_list()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} holds text that is not UTF-8 ({error.reason}, {error.object[:20]!r}). "
            "Convert it."
        ) from error


def _load(source: str) -> datasets.Dataset:
    path = Path(source)
    if path.is_file():
        return _load_file(path)
    if path.suffix in FORMATS or path.is_absolute():
        raise DataError(f"There is no file {path.absolute()}. Check the path.")
    name, _, split = source.partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError, ValueError) as error:
        raise DataError(
            f"{source} is neither a file here ({path.absolute()}) nor a data set that could be "
            f"loaded from the hub: {_first_line(error)}. Check the path, or the id and its split."
        ) from error


def _load_file(path: Path) -> datasets.Dataset:
    reader = FORMATS.get(path.suffix)
    if reader is None:
        raise DataError(
            f"{path} ends in '{path.suffix}'; rows are read from {', '.join(FORMATS)} files. "
            "Convert it."
        )
    if not path.read_bytes()[:1024].strip():
        raise DataError(f"{path} is empty: it has no row. Name a file with at least one.")
    with tempfile.TemporaryDirectory() as cache:
        try:
            return datasets.load_dataset(
                reader, data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True
            )
        except datasets.exceptions.DatasetGenerationError as error:
            raise DataError(
                f"{path} cannot be read as {reader}: {_first_line(error.__cause__ or error)}. "
                "Mend the file; a jsonl file has one JSON object on each line, with the same "
                "columns and types."
            ) from error
        except ValueError as error:
            raise DataError(
                f"{path} is empty: {_first_line(error)}. Name a file with rows."
            ) from error


def _has_texts(row: Row, names: Sequence[str], required: Sequence[str]) -> bool:
    texts = all(isinstance(row[name], str) for name in names)
    return texts and ("prompt" not in required or bool(row["prompt"].strip()))


def _has_types(row: Row, types: Labels) -> bool:
    return all(_is_one_of(kinds, row[name]) for name, kinds in types.items())


def _is_one_of(kinds: tuple[type, ...], value: Any) -> bool:
    # To Python True is a whole number: it would pass for a margin of 1.
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return value is None or isinstance(value, kinds)


def _named(types: Labels) -> str:
    """The columns of labels and their types, as an error goes on after the texts."""
    kinds = {name: " or ".join(kind.__name__ for kind in types[name]) for name in types}
    return "".join(f", or no {kind} in {name}" for name, kind in kinds.items())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _shorten(row: Row) -> str:
    return ", ".join(f"{key}: {value!r:.40}" for key, value in row.items() if key != "row")
