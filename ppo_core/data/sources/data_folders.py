"""Find the files of each split in a folder of data files."""

import re
from itertools import islice
from pathlib import Path

from ppo_core.data.sources.compression import GZIP, format_of
from ppo_core.errors import DataError, library_errors

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
"""Maximum number of files and folders below a data folder: `/` and home folders have more."""

_SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")


def files_by_split(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """Return the files of each split of a folder, sorted by path.

    A file belongs to the split that its name or a folder's name has as a word, or to the split
    NAME if it is called NAME-00000-of-00001. If no name has such a word, all files are `train`.
    Hidden files and folders are ignored.

    Raises:
        DataError: the folder cannot be read, has no data file or more than `MOST_ENTRIES` entries,
            or a split has several formats.
    """
    move = "Name a folder that you may read."
    with library_errors(DataError, f"'{folder}' cannot be read", move):
        entries = sorted(islice(folder.rglob("*"), MOST_ENTRIES + 1))
        found = [path.relative_to(folder) for path in entries]
    if len(found) > MOST_ENTRIES:
        raise DataError(
            f"'{folder}' has more than {MOST_ENTRIES} files and folders below it, so it is hardly "
            "a data set. Name the folder of the data."
        )
    files = [
        path
        for path in found
        if str(path).endswith(suffixes)
        and not any(part.startswith((".", "__")) for part in path.parts)
    ]
    if not files:
        raise DataError(
            f"'{folder}' is a folder without a {', '.join(suffixes)} file. Name another folder, or "
            "convert its files."
        )
    named = [path for path in files if _split_of(path) is not None]
    splits: dict[str, list[Path]] = {}
    for path in named or files:
        splits.setdefault(_split_of(path) or "train", []).append(folder / path)
    for split, paths in splits.items():
        if len(formats := sorted({format_of(path) for path in paths})) > 1:
            raise DataError(
                f"The split '{split}' of '{folder}' has files of the formats "
                f"{', '.join(formats)}. Name one of the files, or keep one format."
            )
    return splits


def _split_of(path: Path) -> str | None:
    if path.suffix == GZIP:
        path = path.with_suffix("")
    if shard := _SHARD.fullmatch(path.stem):
        return shard[1]
    words = re.split(r"[\W\d_]+", str(path.with_suffix("")).lower())
    return next((SPLIT_WORDS[word] for word in reversed(words) if word in SPLIT_WORDS), None)
