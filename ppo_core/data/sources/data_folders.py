"""Find the files of each split in a folder of data files."""

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from ppo_core.data.sources.compression import GZIP, format_of
from ppo_core.errors import ConfigError, DataError, library_errors

SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""Word in a path -> split, as in the `datasets` library."""

MOST_ENTRIES = 20_000
"""Maximum number of files and folders below a data folder. `/` and home folders have more."""

_SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")


def files_by_split(
    folder: Path, suffixes: tuple[str, ...], config: str | None = None
) -> dict[str, list[Path]]:
    """Return the files of each split of a folder, sorted by path.

    A file belongs to a split if its path below the folder contains a word of that split
    (`SPLIT_WORDS`), or if its name is SPLIT-00000-of-00001. Files that belong to no split are
    ignored; if no file belongs to a split, all files are `train`. Files and folders whose name
    begins with `.` or `__` are ignored. If README.md lists the files of each split, as on the hub,
    only that list is used.

    Args:
        folder: the folder.
        suffixes: endings of data files.
        config: name of a configuration in README.md; None takes the default or only configuration.

    Raises:
        ConfigError: README.md has no such configuration, or several configurations and no default.
        DataError: the folder cannot be read, has no data file or more than `MOST_ENTRIES` entries,
            a split has files of several formats, or README.md names files that are missing or
            outside the folder.
    """
    named_there = _splits_of_card(folder, config)
    splits = _splits_of_names(folder, suffixes) if named_there is None else named_there
    for split, paths in splits.items():
        if len(formats := sorted({format_of(path) for path in paths})) > 1:
            raise DataError(
                f"The split '{split}' of '{folder}' has files of the formats "
                f"{', '.join(formats)}. Name one of the files, or keep one format."
            )
    return splits


def _splits_of_names(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    move = "Name a folder that you may read."
    with library_errors(DataError, f"'{folder}' cannot be read", move):
        found = sorted(islice(_visible_entries(folder), MOST_ENTRIES + 1))
    if len(found) > MOST_ENTRIES:
        raise DataError(
            f"'{folder}' has more than {MOST_ENTRIES} files and folders below it, so it is "
            "probably not a data set. Name the folder of the data."
        )
    # Spark writes folders whose names end like the names of data files.
    files = [path for path, is_file in found if is_file and str(path).endswith(suffixes)]
    if not files:
        raise DataError(
            f"'{folder}' is a folder without a {', '.join(suffixes)} file. Name another folder, or "
            "convert its files."
        )
    named = [path for path in files if _split_of(path) is not None]
    splits: dict[str, list[Path]] = {}
    for path in named or files:
        splits.setdefault(_split_of(path) or "train", []).append(folder / path)
    return splits


def _visible_entries(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the path of each file and folder below a folder, and whether it is a file.

    The paths are relative to the folder. Hidden files and folders are left out.

    Raises:
        OSError: the folder, or a folder in it, cannot be read.
    """

    def stop(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=stop):
        folders[:] = filter(_is_visible, folders)
        kinds = ((folders, False), (filter(_is_visible, files), True))
        for names, is_file in kinds:
            yield from ((Path(place, name).relative_to(folder), is_file) for name in names)


def _is_visible(name: str) -> bool:
    return not name.startswith((".", "__"))


def _splits_of_card(folder: Path, config: str | None) -> dict[str, list[Path]] | None:
    """Return the files of each split according to README.md; None if README.md names no files."""
    card = folder / "README.md"
    with library_errors(DataError, f"'{card}' cannot be read", "Correct or remove it."):
        head = (metadata_load(card) if card.is_file() else None) or {}
    named = {
        _text(one.get("config_name", "default"), folder): one
        for one in _list(head.get("configs"))
        if isinstance(one, Mapping) and one.get("data_files")
    }
    if config is not None and config not in named:
        raise ConfigError(
            f"'{folder}' is local and has no configuration '{config}'. "
            + (
                f"Its README.md names {', '.join(named)}."
                if named
                else "Leave the configuration out."
            )
        )
    if not named:
        return None
    default = [name for name, one in named.items() if one.get("default")] or ["default"]
    chosen = config or (default[0] if default[0] in named else next(iter(named)))
    if config is None and len(named) > 1 and chosen not in default:
        raise ConfigError(
            f"The README.md of '{folder}' has the configurations {', '.join(named)}, but no "
            f"default. Name one of them, as in '{folder}:{chosen}/train', or, for `python -m "
            f"ppo_core`, as in --dataset_config {chosen}."
        )
    return {
        split: [file for pattern in patterns for file in _files_of(folder, pattern)]
        for split, patterns in _patterns_of(named[chosen]["data_files"], folder).items()
    }


def _patterns_of(data_files: Any, folder: Path) -> dict[str, list[str]]:
    """Return the patterns of each split; without splits, all files are `train`."""
    patterns: dict[str, list[str]] = {}
    for entry in _list(data_files):
        given = entry if isinstance(entry, Mapping) else {"path": entry}
        of_split = patterns.setdefault(_text(given.get("split", "train"), folder), [])
        of_split += [_text(path, folder) for path in _list(given.get("path"))]
    return patterns


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(value: Any, folder: Path) -> str:
    # Do not show the value: aliases of YAML can make its text larger than the memory.
    if not isinstance(value, str):
        raise DataError(
            f"The README.md of '{folder}' has a {type(value).__name__} where `configs` needs a "
            "text: the name of a configuration or split, or a path. Correct it."
        )
    return value


def _files_of(folder: Path, pattern: str) -> list[Path]:
    if "://" in pattern or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise DataError(
            f"The README.md of '{folder}' names {pattern!r:.80}, which is not in the folder. Name "
            "files below it."
        )
    with library_errors(
        DataError, f"{pattern!r:.80} in '{folder}' is not a pattern", "Correct it."
    ):
        entries = list(islice(folder.glob(pattern), MOST_ENTRIES + 1))
    if len(entries) > MOST_ENTRIES:
        raise DataError(
            f"The pattern {pattern!r:.80} of the README.md of '{folder}' matches more than "
            f"{MOST_ENTRIES} files, and none of them was read. Join the files, or name fewer."
        )
    found = sorted(path for path in entries if path.is_file())
    if not found:
        raise DataError(
            f"The README.md of '{folder}' names {pattern!r:.80}, but no file matches it. Correct "
            "README.md."
        )
    return found


def _split_of(path: Path) -> str | None:
    if path.suffix == GZIP:
        path = path.with_suffix("")
    if shard := _SHARD.fullmatch(path.stem):
        return shard[1]
    words = re.split(r"[\W\d_]+", str(path.with_suffix("")).lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), None)
