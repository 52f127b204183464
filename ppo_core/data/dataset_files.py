"""Load the rows of a data set from a file, a folder, or a hub id."""

from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from ppo_core.errors import ConfigError, DataError

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""File suffix -> builder name of `datasets`."""


def load_rows(path: str, split: str = "train", config: str | None = None) -> Dataset:
    """Return the rows of one split of a data set.

    Args:
        path: a .jsonl, .json or .parquet file; a folder of such files, or written by
            `save_to_disk`; or a hub id. Code of a data set is never run.
        split: name of a split, or a slice such as `train[:100]`; a file has only `train`.
        config: configuration name of a hub data set that has several.

    Raises:
        ConfigError: `config` is given with a local file or folder, which has none.
        DataError: the data set, configuration or split is missing, unreadable or empty.
    """
    local = Path(path)
    if local.exists() and config is not None:
        raise ConfigError(f"'{path}' is local and has no configuration '{config}'. Leave it out.")
    try:
        rows = _read_local(local, split) if local.exists() else _read_hub(path, split, config)
    except DataError:
        raise
    except DatasetGenerationError as error:
        raise _unreadable(path, split, error.__cause__ or error) from error
    # A missing or unreachable data set is an OSError; an invalid split or id is a ValueError.
    except (OSError, ValueError) as error:
        raise _unreadable(path, split, error) from error
    if len(rows) == 0:
        raise DataError(f"The split '{split}' of '{path}' has no row. Choose another split.")
    return rows


def _read_local(path: Path, split: str) -> Dataset:
    if path.is_file():
        return _read_file(path, split)
    saved_one, saved_several = path / "state.json", path / "dataset_dict.json"
    if not (saved_one.exists() or saved_several.exists()):
        return load_dataset(str(path), split=split)
    saved = load_from_disk(str(path))
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise DataError(
                f"'{path}' has no split '{split}'; it has: {', '.join(saved)}. Choose one of them."
            )
        return saved[split]
    if split != "train":
        raise DataError(f"'{path}' holds one data set, which is 'train', not '{split}'.")
    return saved


def _read_file(path: Path, split: str) -> Dataset:
    reader = FORMATS.get(path.suffix)
    if reader is None:
        raise DataError(
            f"'{path}' ends in '{path.suffix}'; rows are read from {', '.join(FORMATS)} files. "
            "Convert it."
        )
    with path.open("rb") as file:
        if not file.read(1024).strip():
            raise DataError(f"'{path}' is empty. Give a file with at least one row.")
    return load_dataset(reader, data_files=str(path), split=split)


def _read_hub(path: str, split: str, config: str | None) -> Dataset:
    if Path(path).suffix in FORMATS or Path(path).is_absolute():
        raise DataError(f"There is no file or folder {Path(path).absolute()}. Check the path.")
    return load_dataset(path, config, split=split)


def _unreadable(path: str, split: str, error: BaseException) -> DataError:
    reason = " ".join(str(error).split()).rstrip(".")
    if Path(path).exists():
        return DataError(
            f"The split '{split}' of '{path}' cannot be read: {reason}. Fix the file or choose "
            "another split; each line of a jsonl file is one JSON object."
        )
    return DataError(
        f"'{path}' is neither a file or folder here ({Path(path).absolute()}) nor a data set whose "
        f"split '{split}' could be loaded from the hub: {reason}. Check the path, or the id."
    )
