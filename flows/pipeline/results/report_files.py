"""Write records as JSON files, and read them back."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ppo_core.errors import DataError
from ppo_core.errors.redaction import mask_values
from ppo_core.io.atomic_files import (
    explained_writes,
    is_stdout,
    is_written_in_place,
    write_atomically,
)
from ppo_core.io.text_files import read_json_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record")

EVALUATION_FILE, REWARD_REPORT_FILE = "evaluation.json", "reward-model.json"
"""Name of the report in the folder of an evaluation, and name of the report on the reward model in
the folder of a run."""


def as_json(record: "DataclassInstance") -> dict[str, Any]:
    """Return a record and its nested records as JSON values, in the order of the fields."""
    return asdict(record)


def write_report(path: Path, report: "DataclassInstance", *, indent: int | None = None) -> None:
    """Write a report as JSON, with secrets masked; the path may be a device such as /dev/stdout.

    Raises:
        TrainingError: the file cannot be written.
    """
    text = json.dumps(mask_values(as_json(report)), indent=indent)
    with explained_writes(path):
        if is_stdout(path):
            sys.stdout.write(text)
        elif is_written_in_place(path):
            path.write_text(text, encoding="utf-8")
        else:
            write_atomically(path, text)


def read_report(path: Path, kind: type[Record]) -> Record:
    """Read a file that `write_report` wrote; fields that `kind` does not have are ignored.

    Raises:
        DataError: the file cannot be read, or a field is missing or has a value of another type.
    """
    # Imported here, because every step imports this module, and few steps read a report.
    from ppo_core.io.validation import read_record

    value = read_json_file(path, DataError)
    try:
        return read_record(value, kind)
    except ValueError as error:
        raise DataError(
            f"'{path}' is damaged, so its figures cannot be used: {error}. The file was changed, "
            "or another version wrote it. Restore the file, or start a new run."
        ) from error
