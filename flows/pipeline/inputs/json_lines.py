"""Read and write the JSON Lines files of a run."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ppo_core.data.sources.json_rows import read_json_rows
from ppo_core.errors import DataError
from ppo_core.errors.redaction import mask_values
from ppo_core.io.atomic_files import explained_writes, replacing
from ppo_core.io.validation import read_record

Record = TypeVar("Record")


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Return the JSON objects in a file that `write_jsonl` wrote.

    Raises:
        DataError: the file is missing, or a line is not a JSON object.
    """
    return list(read_json_rows(Path(path)))


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Return the rows of a file that `write_jsonl` wrote, as records such as dataclasses.

    Raises:
        DataError: the file is missing or damaged.
    """
    rows = read_jsonl(path)
    try:
        return [read_record(row, kind) for row in rows]
    except ValueError as error:
        raise DataError(f"'{path}' is damaged: {error}.") from error


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]], *, is_masked: bool = True) -> None:
    """Write one JSON object per line, with secrets masked unless `is_masked` is False.

    Samples that train a model are not masked, because the masks depend on the environment of the
    machine. Files that people read stay masked, also if their rows train a model later. A value of
    a type that JSON lacks, such as a date, is written as text.

    Raises:
        TrainingError: the file cannot be written.
    """
    with (
        explained_writes(path),
        replacing(path) as unfinished,
        unfinished.open("w", encoding="utf-8") as file,
    ):
        file.writelines(json_line(row, is_masked=is_masked) for row in rows)


def json_line(row: Mapping[str, Any], *, is_masked: bool = True) -> str:
    """Return a row as a line of JSON.

    With `is_masked`, secrets in texts, and all texts in fields with the name of a secret, are
    masked.
    """
    shown = mask_values(row, by_name=True) if is_masked else row
    return json.dumps(shown, ensure_ascii=False, default=str) + "\n"
