"""Loading of data sets from a file, a folder, an address, or the Hugging Face Hub."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pyarrow
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    Json,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)

from ppo_core.config.checks import is_finite
from ppo_core.data.data_addresses import download, is_data_address, require_allowed
from ppo_core.data.data_folders import files_by_split
from ppo_core.data.json_rows import JSONRow, read_json_rows
from ppo_core.data.parquet_rows import read_parquet_rows
from ppo_core.errors import ConfigError, DataError, library_errors
from ppo_core.errors.redaction import redact

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""File suffix -> name of the builder in the `datasets` library."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)

_KINDS = {str: "text", bool: "true or false", int: "number", float: "number", list: "list"}

OpenedRows: TypeAlias = Dataset | list[JSONRow]
"""Rows as `datasets` holds them, or as a JSON file holds them: with different keys and types."""


def load_rows(
    path: str, split: str = "train", config: str | None = None, *, allow_urls: bool = False
) -> Dataset:
    """Return the rows of one split of a data set, with one type for each column.

    Args:
        path: as `name` of `open_data`.
        split: name of a split, or a slice such as `train[:100]`; a file has only `train`.
        config: configuration name, for a hub data set with several configurations.
        allow_urls: whether `path` may be an address.

    Raises:
        ConfigError: `config` is given, but `path` is a local file or folder.
        DataError: the data set, configuration or split is missing, unreadable or empty, or a column
            has values of different types.
    """
    rows = open_data(path, split, config, allow_urls=allow_urls)
    return rows if isinstance(rows, Dataset) else _as_dataset(rows, path)


def open_data(
    name: str, split: str = "train", config: str | None = None, *, allow_urls: bool = False
) -> OpenedRows:
    """Return the rows of one split of a data set.

    A name that exists here is a local file or folder, whatever characters it has. Code in a hub
    data set is never run: `datasets` has no loading scripts since its version 4.

    Args:
        name: a .jsonl, .json or .parquet file, a folder of such files, a folder written by
            `save_to_disk`, an address of such a file, or a hub id.
        split: name of a split, or a slice such as `train[:100]`; a file has only `train`.
        config: configuration name, for a hub data set with several configurations.
        allow_urls: whether `name` may be an address.

    Raises:
        ConfigError: `config` is given, but `name` is a local file or folder.
        DataError: the data set, configuration or split is missing, unreadable or empty.
    """
    if os.path.lexists(name):
        if config is not None:
            raise ConfigError(
                f"'{name}' is local and has no configuration '{config}'. Leave the configuration "
                "out."
            )
        rows = _read_local(Path(name), split)
    elif is_data_address(name):
        require_allowed(name, allowed=allow_urls)
        rows = _read_address(name, split)
    else:
        rows = _read_hub(name, split, config)
    if len(rows) == 0:
        raise DataError(
            f"'{name}' is empty: its split '{split}' has no row. Name a data set with at least one."
        )
    return rows


def open_named_split(source: str, *, allow_urls: bool = False) -> OpenedRows:
    """Return the rows of `NAME` or `NAME:SPLIT`; the default split is `train`.

    Raises:
        DataError: see `open_data`.
    """
    if os.path.lexists(source) or is_data_address(source):
        return open_data(source, allow_urls=allow_urls)
    name, _, split = source.partition(":")
    return open_data(name, split or "train")


def load_named_split(source: str, *, allow_urls: bool = False) -> Dataset:
    """Return the rows of `NAME` or `NAME:SPLIT`, with one type for each column.

    Raises:
        DataError: see `load_rows`.
    """
    rows = open_named_split(source, allow_urls=allow_urls)
    return rows if isinstance(rows, Dataset) else _as_dataset(rows, source)


@contextmanager
def named_data(name: str | None) -> Iterator[None]:
    """Add the name of the data set to the message of a DataError of the block, about its rows."""
    try:
        yield
    except DataError as error:
        raise DataError(f"'{name}': {error}") from error


def _read_local(path: Path, split: str) -> OpenedRows:
    if not path.is_dir():
        return _take_split({"train": [path]}, split, path)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return _read_saved(path, split)
    return _take_split(files_by_split(path, tuple(FORMATS)), split, path)


def _take_split(splits: dict[str, list[Path]], split: str, path: Path) -> OpenedRows:
    """Read the files of one split, and return the rows of the slice that `split` may name."""
    name = re.split(r"[\[(]", split, maxsplit=1)[0]
    if name not in splits:
        raise _no_split(path, split, list(splits))
    rows = _join([_read_file(file) for file in splits[name]], path)
    return _slice(rows, name, split, path)


def _slice(rows: OpenedRows, name: str, split: str, path: Path) -> OpenedRows:
    if split == name:
        return rows
    move = "Write the split as NAME, NAME[:COUNT] or NAME[FROM:TO]."
    with library_errors(DataError, f"The split '{split}' of '{path}' cannot be read", move):
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
        if len(parts) != 1:
            raise ValueError("it names several splits")
        begin, end = parts[0].from_, max(parts[0].from_, parts[0].to)
        return rows.select(range(begin, end)) if isinstance(rows, Dataset) else rows[begin:end]


def _join(parts: list[OpenedRows], path: Path) -> OpenedRows:
    tables = [part for part in parts if isinstance(part, Dataset)]
    if not tables:
        return [row for part in parts for row in part]
    move = "Write all files with the same columns and types."
    with library_errors(DataError, f"The files of '{path}' cannot be joined", move):
        return concatenate_datasets(tables)


def _read_file(path: Path) -> OpenedRows:
    match FORMATS.get(path.suffix):
        case "json":
            return read_json_rows(path)
        case "parquet":
            return read_parquet_rows(path)
    raise DataError(
        f"'{path}' ends in '{path.suffix}', but rows are read only from {', '.join(FORMATS)} "
        "files. Convert the file."
    )


def _read_saved(path: Path, split: str) -> Dataset:
    if is_data_address(str(path)):
        raise DataError(f"`datasets` would take '{path}' for an address. Rename the folder.")
    move = "Save the data set again, or name its files."
    with library_errors(DataError, f"'{path}' cannot be read", move):
        saved = load_from_disk(str(path))
        splits = dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}
        name = re.split(r"[\[(]", split, maxsplit=1)[0]
        if name not in splits:
            raise _no_split(path, split, list(splits))
        return _slice(_without_media(splits[name]), name, split, path)


def _read_address(address: str, split: str) -> OpenedRows:
    shown = redact(address)
    suffix = Path(shown).suffix
    if suffix not in FORMATS:
        raise DataError(
            f"'{shown}' ends in '{suffix}', but rows are read only from {', '.join(FORMATS)} "
            "files. Name the address of such a file."
        )
    if address.startswith(("http://", "https://")) and "::" not in address:
        with TemporaryDirectory() as folder, named_data(shown):
            file = download(address, Path(folder))
            return _slice(_read_file(file), "train", split, Path(shown))
    move = "Download the file, and name the copy."
    with library_errors(DataError, f"'{shown}' cannot be loaded", move):
        return _without_media(load_dataset(FORMATS[suffix], data_files=address, split=split))


def _read_hub(name: str, split: str, config: str | None) -> Dataset:
    here = f"{Path(name).absolute()!s:.300}"
    if Path(name).suffix in FORMATS or not _HUB_ID.fullmatch(name):
        raise DataError(f"There is no file or folder {here}. Check the path.")
    # `load_dataset` would take the name of a format for the files in the working directory.
    if "." not in name and find_spec(f"datasets.packaged_modules.{name}") is not None:
        raise DataError(f"There is no file or folder {here}. '{name}' is a format; name a file.")
    failure = (
        f"'{name}' is not a local file or folder ({here} does not exist), and no data set of this "
        f"name with a split '{split}' could be loaded from the hub"
    )
    with library_errors(DataError, failure, "Check the path, or the hub id."):
        return _without_media(load_dataset(name, config, split=split))


def _no_split(path: Path, split: str, splits: list[str]) -> DataError:
    return DataError(
        f"'{path}' has no split '{split}'. Choose one of its splits: {', '.join(splits)}."
    )


def _without_media(rows: Dataset) -> Dataset:
    """Remove the columns of images and other media, whose values name files and addresses."""
    media = [name for name, feature in rows.features.items() if _is_media(feature)]
    return rows.remove_columns(media)


def _is_media(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_is_media, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(_is_media, feature))
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_media(inner)
    return hasattr(feature, "decode_example") and type(feature).__name__ != "Json"


def _as_dataset(rows: list[JSONRow], source: str) -> Dataset:
    names = dict.fromkeys(name for row in rows for name in row)
    if not names:
        raise DataError(f"'{source}' has no column: all its rows are empty. Name other data.")
    for name in names:
        _require_one_kind(rows, name, source)
    columns = {name: [row.get(name) for row in rows] for name in names}
    move = "Give each column one type."
    with library_errors(DataError, f"The rows of '{source}' cannot be used", move):
        types = Features({name: _type_of(values) for name, values in columns.items()})
        return Dataset.from_dict(columns, features=types)


def _type_of(values: list[Any]) -> Any:
    """Return the type of a column; JSON if Arrow has no type for its values.

    `on_mixed_types="use_json"` of `datasets` does the same, but loops forever on some values.
    """
    try:
        kind = pyarrow.array(values).type
    except (ValueError, pyarrow.ArrowTypeError):
        return Json()
    # Arrow's files cut a key at a null character, so two keys could become equal.
    if "\0" in str(kind):
        return Json()
    return Features.from_arrow_schema(pyarrow.schema({"column": kind}))["column"]


def _require_one_kind(rows: list[JSONRow], name: str, source: str) -> None:
    """Raise unless all values of a column are of one JSON type, or missing."""
    first: tuple[int, str] | None = None
    for number, row in enumerate(rows):
        if (value := row.get(name)) is None:
            continue
        if isinstance(value, int) and not is_finite(value):
            raise DataError(
                f"The column '{name}' of '{source}' has an integer of over 64 bits in row "
                f"{number}. Correct the row."
            )
        kind = _KINDS.get(type(value), "object")
        if first is not None and kind != first[1]:
            raise DataError(
                f"The column '{name}' of '{source}' has values of different types: {first[1]} in "
                f"row {first[0]}, but {kind} in row {number}: {value!r:.80}. Correct the row."
            )
        first = first or (number, kind)
