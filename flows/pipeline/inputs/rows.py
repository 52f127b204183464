"""Read, check and digest rows of text from a file, a folder or the hub."""

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
from ppo_core.redaction import mask_secrets

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
) -> Rows:
    """Read the named columns of a data set and set unusable rows aside.

    Args:
        source: a jsonl, json or parquet file, a folder of such files, or a hub id. A hub id may
            name a split after a colon, as in `org/name:test`; the default is `train`.
        required: text columns that must exist. A required `prompt` must not be empty; a response
            may be empty, because a model can answer nothing.
        optional: text columns that are read if they exist.
        labels: other columns that are read if they exist. A missing value is None; a value of
            another type or a number that is not finite makes its row unusable.

    Raises:
        DataError: the data set or a column is missing, there is no row, or more than 1 % of the
            rows are unusable.
    """
    data = _load(source)
    if missing := [name for name in required if name not in data.column_names]:
        raise DataError(
            f"{source} has no column {', '.join(missing)}; its columns are "
            f"{', '.join(data.column_names)}. Rename a column."
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
    """Return the JSON objects in a file that `write_jsonl` wrote."""
    # Not `splitlines`, which also splits at U+2028 and U+0085, and answers may contain these.
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, with secrets masked."""
    with path.open("w", encoding="utf-8") as file:
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        file.writelines(mask_secrets(line) + "\n" for line in lines)


def _rows_of(data: datasets.Dataset, source: str) -> list[dict[str, Any]]:
    try:
        return data.to_list()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} holds text that is not UTF-8 ({error.reason}, {error.object[:20]!r}). "
            "Convert the data to UTF-8."
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
            "Convert the file."
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
                "Correct the file; a jsonl file has one JSON object on each line, with the same "
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
    # bool is a subclass of int, so True would pass as a margin of 1.
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return value is None or isinstance(value, kinds)


def _named(types: Labels) -> str:
    """Return the label columns and their types as the end of an error message."""
    kinds = {name: " or ".join(kind.__name__ for kind in types[name]) for name in types}
    return "".join(f", or no {kind} in {name}" for name, kind in kinds.items())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _shorten(row: Row) -> str:
    return ", ".join(f"{key}: {value!r:.40}" for key, value in row.items() if key != "row")
