"""Open a data set from a file, a folder, an address, or the Hugging Face Hub."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets

from ppo_core.data.sources.compression import GZIP, format_of
from ppo_core.data.sources.csv_rows import read_csv_rows
from ppo_core.data.sources.data_addresses import download, is_data_address, require_allowed
from ppo_core.data.sources.data_folders import files_by_split
from ppo_core.data.sources.hub_data import HubData, absolute_path, without_media
from ppo_core.data.sources.json_rows import read_json_rows
from ppo_core.data.sources.parquet_rows import read_parquet_rows
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE, RawRow
from ppo_core.data.sources.saved_folders import check_saved_folder, is_saved_folder
from ppo_core.errors import ConfigError, DataError, library_errors
from ppo_core.errors.redaction import redact
from ppo_core.io.folder_cache import digest_of, digest_of_file, digest_of_folder


@dataclass(frozen=True)
class _Format:
    """How the rows of a file are read."""

    read: Callable[[Path], Iterator[RawRow]]
    """This project's function that reads the rows of a local file."""

    builder: str
    """Name of the builder in the `datasets` library that reads an address."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the builder."""


FORMATS = {
    ".jsonl": _Format(read_json_rows, "json"),
    ".json": _Format(read_json_rows, "json"),
    ".csv": _Format(read_csv_rows, "csv"),
    ".tsv": _Format(partial(read_csv_rows, delimiter="\t"), "csv", {"sep": "\t"}),
    ".parquet": _Format(read_parquet_rows, "parquet"),
    ".pq": _Format(read_parquet_rows, "parquet"),
}
"""File suffix -> how the rows are read."""

SUFFIXES = (
    *FORMATS,
    *(suffix + GZIP for suffix, form in FORMATS.items() if form.builder != "parquet"),
)
"""Endings of the files that can be read."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


@dataclass(frozen=True)
class Source:
    """One split of a data set, or a slice of a split."""

    name: str
    """Name of the data set for messages: path, address without secrets, or hub id."""

    digest: str
    """Digest of the content."""

    rows: Callable[[], Iterator[RawRow]]
    """Start a new stream of the rows. The stream raises DataError if a row cannot be read."""

    split: str = "train"
    """Name of the split, followed by the slice if there is one."""

    temporary_folder: Any = None
    """Folder with the file downloaded from an address; it is deleted with this object."""


def open_source(
    name: str,
    split: str | None = None,
    config: str | None = None,
    *,
    allow_urls: bool = False,
) -> Source:
    """Return one split of a data set as a source.

    A name that exists on this machine is a local file or folder, even if it looks like an address
    or a hub id. Code in a hub data set is never run: since version 4, `datasets` does not support
    loading scripts.

    Args:
        name: a .jsonl, .json, .csv, .tsv or .parquet file (also .jsonl.gz, .json.gz, .csv.gz,
            .tsv.gz and .pq), a folder of such files, a folder written by `save_to_disk`, an address
            of such a file, or a hub id with or without `@REVISION`. If `split` is None, a folder or
            hub id may end in `:SPLIT` or `:CONFIG/SPLIT`.
        split: name of a split, or a slice such as `train[:100]`; a file has only `train`. If None,
            the split at the end of `name`, or `train` if `name` has no split.
        config: configuration name, for a hub data set with several configurations, or for a folder
            whose README.md lists several configurations.
        allow_urls: whether `name` may be an address.

    Raises:
        ConfigError: a local file or folder has no such configuration.
        DataError: the data set, configuration or split is missing or unreadable.
    """
    if is_data_address(name) and not os.path.lexists(name):
        require_allowed(name, allowed=allow_urls)
        return _open_address(name, split or "train")
    given = name
    if split is None and not os.path.lexists(name):
        name, split, in_name = split_of_name(name)
        config = in_name or config
    if not os.path.lexists(name):
        return _open_hub(_hub_data(given, name, split, config))
    return _open_local(Path(name), split or "train", config)


def find_hub_data(name: str) -> HubData | None:
    """Return the hub data set of a name, which may end in a split; None for a path or an address.

    Raises:
        DataError: there is no such file, and the hub cannot have a data set of this name.
    """
    if is_data_address(name) or os.path.lexists(name):
        return None
    place, split, config = split_of_name(name)
    return None if os.path.lexists(place) else _hub_data(name, place, split, config)


def split_of_name(name: str) -> tuple[str, str | None, str | None]:
    """Return PLACE, SPLIT and CONFIG of PLACE, PLACE:SPLIT or PLACE:CONFIG/SPLIT."""
    place, _, split = name.partition(":")
    if "/" not in split.partition("[")[0]:
        return place, split or None, None
    config, _, split = split.partition("/")
    return place, split, config


def source_of_rows(rows: Any) -> Source:
    """Return rows in memory, or a `datasets.Dataset`, as a source; a stream is read into memory.

    Raises:
        DataError: the rows are a single text, or several splits.
    """
    if isinstance(rows, Mapping | str):
        raise DataError(
            f"The rows are {type(rows).__name__}, {rows!r:.80}, not a list of rows or a single "
            "data set. Load the data set first, or choose one of its splits."
        )
    if isinstance(rows, datasets.Dataset):
        return _of_data_set("the rows", digest_of([rows._fingerprint]), rows)
    rows, digest = list(rows), hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
    return Source("the rows", digest.hexdigest(), lambda: iter(rows))


def _open_local(path: Path, split: str, config: str | None) -> Source:
    is_saved = is_saved_folder(path)
    if config is not None and (is_saved or not path.is_dir()):
        raise ConfigError(
            f"'{path}' is local and has no configuration '{config}'. Leave the configuration out."
        )
    if is_saved:
        return _open_saved(path, split)
    splits = files_by_split(path, SUFFIXES, config) if path.is_dir() else {"train": [path]}
    files = splits.get(_name_of(split))
    if files is None:
        raise _no_split(path, split, list(splits))
    move = "Name a file of rows that you may read."
    with library_errors(DataError, f"'{path}' cannot be read", move):
        digest = digest_of([_digest_of_file(file) for file in files])
    source = Source(str(path), digest, lambda: chain.from_iterable(map(_read_file, files)))
    return _sliced(source, split)


def _digest_of_file(path: Path) -> str:
    # Read one row first, so that an unreadable file is refused before the digest reads all of it.
    next(_read_file(path), None)
    return format_of(path) + digest_of_file(path)


def _read_file(path: Path) -> Iterator[RawRow]:
    if str(path).endswith(SUFFIXES):
        return FORMATS[format_of(path)].read(path)
    raise DataError(
        f"'{path}' ends in '{path.suffix}', but rows are read only from {', '.join(SUFFIXES)} "
        "files. Convert the file."
    )


# --- Data sets of the library `datasets` -------------------------------------------


def _open_saved(path: Path, split: str) -> Source:
    if is_data_address(str(path)):
        raise DataError(f"`datasets` would take '{path}' for an address. Rename the folder.")
    move = "Save the data set again, or name its files."
    with library_errors(DataError, f"'{path}' cannot be read", move):
        check_saved_folder(path)
        saved = datasets.load_from_disk(str(path))
        splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        name = _name_of(split)
        if name not in splits:
            raise _no_split(path, split, list(splits))
        digest = digest_of([name, digest_of_folder(path)])
    return _sliced(_of_data_set(str(path), digest, splits[name]), split)


def _open_address(address: str, split: str) -> Source:
    shown = redact(address)
    path = Path(shown)
    if not shown.endswith(SUFFIXES):
        raise DataError(
            f"'{shown}' ends in '{path.suffix}', but rows are read only from "
            f"{', '.join(SUFFIXES)} files. Name the address of such a file."
        )
    if address.startswith(("http://", "https://")) and "::" not in address:
        folder = TemporaryDirectory()
        file = download(address, Path(folder.name))
        with named_data(shown):
            source = _open_local(file, split, None)
        return replace(
            source,
            name=shown,
            rows=lambda: _named(shown, source.rows()),
            temporary_folder=folder,
        )
    move = "Download the file, and name the copy."
    with library_errors(DataError, f"'{shown}' cannot be loaded", move):
        form = FORMATS[format_of(path)]
        loaded = datasets.load_dataset(
            form.builder, data_files=address, split=split, **form.options
        )
        return _of_data_set(shown, digest_of([shown, loaded._fingerprint]), loaded)


def _hub_data(given: str, place: str, split: str | None, config: str | None) -> HubData:
    name, _, revision = place.partition("@")
    here = absolute_path(given)
    if name.endswith(SUFFIXES) or not _HUB_ID.fullmatch(name):
        move = "Check the path."
        path, in_name, named = split_of_name(place)
        if in_name:  # `python -m ppo_core` has a setting for the split
            named = f" --dataset_config {named}" if named else ""
            move = f"Set --dataset_name {path} --dataset_train_split {in_name}{named}."
        raise DataError(f"There is no file or folder {here}. {move}")
    # For the name of a format, such as json, `load_dataset` would read the working directory.
    if "." not in name and find_spec(f"datasets.packaged_modules.{name}") is not None:
        raise DataError(f"There is no file or folder {here}. '{name}' is a format; name a file.")
    return HubData(
        given=given,
        repository=name,
        revision=revision or None,
        config=config,
        split=split or "train",
    )


def _open_hub(data: HubData) -> Source:
    loaded = data.load()
    digest = digest_of([data.given, data.config, data.split, loaded._fingerprint])
    return replace(_of_data_set(data.given, digest, loaded), split=data.split)


def _of_data_set(name: str, digest: str, loaded: Any) -> Source:
    # Remove the format, because a saved data set may return tensors of torch or numpy.
    plain = without_media(loaded).with_format(None)

    def rows() -> Iterator[RawRow]:
        with library_errors(DataError, f"'{name}' cannot be read", "Convert the data to UTF-8."):
            for batch in plain.iter(ROWS_AT_ONCE):
                yield from (
                    dict(zip(batch, values, strict=True))
                    for values in zip(*batch.values(), strict=True)
                )

    return Source(name, digest, rows)


@contextmanager
def named_data(name: str | None) -> Iterator[None]:
    """Add the name of the data set to the message of a DataError that the block raises."""
    try:
        yield
    except DataError as error:
        raise DataError(f"'{name}': {error}") from error


def _named(name: str, rows: Iterator[RawRow]) -> Iterator[RawRow]:
    with named_data(name):
        yield from rows


# --- Splits and slices -------------------------------------------------------------


def _name_of(split: str) -> str:
    return re.split(r"[\[(]", split, maxsplit=1)[0]


def _sliced(source: Source, split: str) -> Source:
    """Return the source; if `split` has a slice, as in `train[:100]`, keep only its rows."""
    name = _name_of(split)
    if split == name:
        return replace(source, split=split)
    move = "Write the split as NAME, NAME[:COUNT] or NAME[FROM:TO]."
    with library_errors(DataError, f"The split '{split}' of '{source.name}' cannot be read", move):
        count = sum(1 for _ in source.rows())
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: count})
        if len(parts) != 1:
            raise ValueError("it names several splits")
        begin, end = parts[0].from_, max(parts[0].from_, parts[0].to)
    return replace(
        source,
        split=split,
        digest=digest_of([source.digest, begin, end]),
        rows=lambda: islice(source.rows(), begin, end),
    )


def _no_split(path: Path, split: str, splits: list[str]) -> DataError:
    return DataError(
        f"'{path}' has no split '{split}'. Choose one of its splits: {', '.join(splits)}."
    )
