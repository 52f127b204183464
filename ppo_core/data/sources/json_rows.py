"""Read rows from JSON files: one object on each line, or one list of objects."""

import codecs
from collections.abc import Iterator
from itertools import chain
from json import JSONDecodeError
from pathlib import Path
from typing import BinaryIO

from ppo_core.data.sources.compression import open_data_file
from ppo_core.data.sources.raw_row import RawRow
from ppo_core.errors import DataError, library_errors, reason_of
from ppo_core.io.text_files import parse_strict_json

MAX_LINE_BYTES = 1 << 26
"""A line, which is one row, must have fewer bytes than this."""

MAX_LIST_BYTES = 1 << 30
"""Maximum bytes of a file with one list of rows, because this file is read as a whole."""

_SHOWN_CHARACTERS = 60
"""Number of characters of a broken line that a message shows."""

_OTHER_FORMATS = {
    b"\x1f\x8b": "is compressed by gzip. Rename the file to end in .gz.",
    b"PK\x03\x04": "is a zip archive. Extract its file.",
    b"PAR1": "is a Parquet file. Rename the file to end in .parquet.",
    b"\xff\xfe": "is UTF-16. Convert the file to UTF-8.",
    b"\xfe\xff": "is UTF-16. Convert the file to UTF-8.",
}
"""First bytes of a format whose files often have the name of a JSON file -> advice."""


def read_json_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a JSON file, which may be compressed; an empty file has no rows.

    A byte-order mark and empty lines are ignored. Rows may have different keys.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or a row is not a JSON object. The message
            names the number of a wrong row, counted from 0. In a file with one object on each line,
            it also names the number of the line, counted from 1. If the line is not JSON, it names
            the line but not the row.
    """
    failure, move = f"'{path}' cannot be read", "Name a file of rows that you may read."
    with library_errors(DataError, failure, move), open_data_file(path) as file:
        start = file.read(4)
        for magic, advice in _OTHER_FORMATS.items():
            if start.startswith(magic):
                raise DataError(f"'{path}' cannot be read: it {advice}")
        file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
        lines = _filled_lines(file)
        first = next(lines, (1, b""))
        if first[1].lstrip().startswith(b"["):
            yield from _read_list(first[1] + file.read(MAX_LIST_BYTES + 1), path)
        elif first[1]:
            yield from _read_lines(chain([first], lines), path)


def _filled_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers, counted from 1."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if line.strip():
            yield number, line


def _read_lines(lines: Iterator[tuple[int, bytes]], path: Path) -> Iterator[RawRow]:
    for row, (number, line) in enumerate(lines):
        try:
            if len(line) == MAX_LINE_BYTES:
                raise ValueError(f"it has {MAX_LINE_BYTES >> 20} MiB or more")
            # In a string that is cut off, the line break would be reported as a wrong character.
            value = _as_row(_parse(line.rstrip(b"\r\n")))
        except JSONDecodeError as error:
            raise DataError(
                f"'{path}' cannot be read: line {number} is not valid JSON: {_fault(error)}. The "
                f"line begins with {error.doc[:_SHOWN_CHARACTERS]!r}. Correct the line. Each line "
                "must be one JSON object in UTF-8."
            ) from error
        except ValueError as error:
            raise DataError(
                f"'{path}' cannot be read: row {row} (line {number}): {reason_of(error)}. "
                "Correct the line. Each line must be one JSON object in UTF-8."
            ) from error
        yield value


def _read_list(text: bytes, path: Path) -> Iterator[RawRow]:
    try:
        if len(text) > MAX_LIST_BYTES:
            raise ValueError("it is one list of more than 1 GiB; write one object on each line")
        items = _parse(text)
        if not isinstance(items, list):
            raise ValueError(f"it holds {type(items).__name__}, not a list")
    except ValueError as error:
        raise DataError(
            f"'{path}' cannot be read as a list of rows: {reason_of(error)}. Correct the file."
        ) from error
    for row, item in enumerate(items):
        try:
            value = _as_row(item)
        except ValueError as error:
            raise DataError(
                f"'{path}' cannot be read: row {row}: {error}. Correct the row."
            ) from error
        yield value


def _parse(text: bytes) -> object:
    try:
        return parse_strict_json(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start} ({error.reason})") from None


def _fault(error: JSONDecodeError) -> str:
    # The decoder's own message would always name line 1, because it decodes a single line.
    place = f"character {error.pos + 1}"
    if error.msg.startswith("Unterminated string"):
        return f"it ends inside the string that starts at {place}, so it is probably cut off"
    return f"{error.msg.removesuffix(' at').rstrip(': ')} at {place}"


def _as_row(value: object) -> RawRow:
    if not isinstance(value, dict):
        raise ValueError(f"it is {value!r:.80}, not an object of columns")
    return value
