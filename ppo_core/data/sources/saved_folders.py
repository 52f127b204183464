"""Check a folder written by `save_to_disk` before `datasets` opens the files listed in it."""

from pathlib import Path
from typing import Any

from ppo_core.errors import DataError
from ppo_core.io.text_files import open_regular_file, parse_strict_json

INFO, STATE, SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"
"""Files by which `datasets` recognizes a folder written by `save_to_disk`."""


def is_saved_folder(path: Path) -> bool:
    """Return whether `path` is a folder that `save_to_disk` wrote."""
    return path.is_dir() and any((path / name).exists() for name in (STATE, SPLITS))


def check_saved_folder(path: Path) -> None:
    """Raise if a saved data set lists, or links to, a file outside its folder.

    Without this check, `datasets` would read any file of this machine that the folder lists.

    Raises:
        DataError: a file is refused or missing; the message names the file.
        ValueError: a file is not of the form that `save_to_disk` writes.
        OSError: a file cannot be read.
    """
    root = path.resolve()
    folders = [path]
    # Like `datasets`: a folder with the files of one data set is read as one, whatever SPLITS says.
    is_one = (path / INFO).is_file() and (path / STATE).is_file()
    if not is_one and (path / SPLITS).exists():
        splits = _read(path / SPLITS, root).get("splits")
        folders = [_inside(path, name, path / SPLITS, root) for name in _names(splits, "splits")]
    for folder in folders:
        for file in sorted(folder.iterdir()):
            _require_inside(file, root)
        state = _read(folder / STATE, root)
        files = state.get("_data_files")
        if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
            raise ValueError(f"{STATE} has no list of _data_files")
        for name in _names([file.get("filename") for file in files], "_data_files"):
            file = _inside(folder, name, folder / STATE, root)
            if not file.is_file():
                raise DataError(
                    f"'{file}' is missing, or no regular file. Save the data set again."
                )


def _read(file: Path, root: Path) -> dict[str, Any]:
    _require_inside(file, root)
    with open_regular_file(file) as content:
        document = parse_strict_json(content.read().decode())
    if not isinstance(document, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return document


def _names(names: object, key: str) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"its {key} are not a list of names")
    return names


def _inside(folder: Path, name: str, named_by: Path, root: Path) -> Path:
    """Return the path of a listed file; raise if `save_to_disk` cannot have written its name."""
    # A backslash or colon leads out of the folder on other systems, or makes the name an address.
    if name in ("", ".", "..") or set("/\\:\0") & set(name):
        raise DataError(
            f"'{named_by}' is refused: it names {name!r:.200}, which is not a file of its folder. "
            "Nothing was read. Save the data set again with save_to_disk."
        )
    _require_inside(folder / name, root)
    return folder / name


def _require_inside(file: Path, root: Path) -> None:
    target = file.resolve()
    if not target.is_relative_to(root):
        raise DataError(
            f"'{file}' is refused: it is a link out of its folder, to '{target}'. Nothing was "
            "read. Copy the file into the folder."
        )
