"""Read text, TOML and JSON from outside; an error names the file and the place in the file."""

import json
import os
import re
import stat
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from ppo_core.errors import PPOError, library_errors

MAX_DEPTH = 100
"""Maximum number of nested lists and objects in JSON. Deeper values overflow the stack of the
libraries that process them."""

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of a surrogate, which is not a character without its other half."""


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file for reading. A pipe, a device, a socket or a folder is refused without waiting.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError("it is a pipe, a device or a socket, not a file")


def read_text_file(path: Path, kind: type[PPOError]) -> str:
    """Return the text of a UTF-8 file without its byte-order mark.

    Raises:
        kind: the file cannot be read, or is not UTF-8.
    """
    move = "Name a text file in UTF-8 that you may read."
    with library_errors(kind, f"'{path}' cannot be read", move), open_regular_file(path) as file:
        return file.read().decode("utf-8-sig")


def read_toml_file(path: Path, kind: type[PPOError]) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        kind: the file cannot be read, or is not TOML.
    """
    text = read_text_file(path, kind)
    with library_errors(kind, f"'{path}' cannot be read as TOML", "Correct the file."):
        return tomllib.loads(text)


def read_json_file(path: Path, kind: type[PPOError]) -> Any:
    """Return the value in a JSON file.

    Raises:
        kind: the file cannot be read, or `parse_strict_json` refuses its text.
    """
    text = read_text_file(path, kind)
    with library_errors(kind, f"'{path}' cannot be read as JSON", "Correct the file."):
        return parse_strict_json(text)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON document; `options` go to `json.loads`.

    Raises:
        ValueError: the text is not UTF-8, not JSON, or nested more than `MAX_DEPTH` levels deep.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def parse_strict_json(text: str) -> Any:
    """Return the value of a JSON text from outside.

    Raises:
        ValueError: see `parse_json`; or an object has a key twice, or a text has half of a
            surrogate pair, which cannot be encoded.
    """
    value = parse_json(text, object_pairs_hook=_without_repeated_keys)
    if has_half_character(text):
        raise ValueError("it has half of a surrogate pair, which is not a character")
    return value


def has_half_character(text: str) -> bool:
    """Return whether a JSON text has half of a surrogate pair, written as an escape."""
    if not _HALF_CHARACTER.search(text):
        return False
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r:.80} is given twice")
    return value


def _depth(value: Any) -> int:
    """Return the number of levels of nested lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [
            child for item in level for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
