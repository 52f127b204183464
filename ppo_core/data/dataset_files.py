"""Loading of data sets from a file, a folder, or the Hugging Face Hub."""

from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from ppo_core.errors import ConfigError, DataError

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""File suffix -> name of the builder in the `datasets` library."""


def load_rows(path: str, split: str = "train", config: str | None = None) -> Dataset:
    """Return the rows of one split of a data set.

    Args:
        path: a .jsonl, .json or .parquet file, a folder of such files, a folder written by
            `save_to_disk`, or a hub id. Code in a hub data set is never run.
        split: name of a split, or a slice such as `train[:100]`; a file has only `train`.
        config: configuration name, for a hub data set with several configurations.

    Raises:
        ConfigError: `config` is given, but `path` is a local file or folder.
        DataError: the data set, configuration or split is missing, unreadable or empty.
    """
    local = Path(path)
    if local.exists() and config is not None:
        raise ConfigError(
            f"'{path}' is local and has no configuration '{config}'. Leave the configuration out."
        )
    try:
        rows = _read_local(local, split) if local.exists() else _read_hub(path, split, config)
    except DataError:
        raise
    except DatasetGenerationError as error:
        raise _unreadable(path, split, error.__cause__ or error) from error
    # A missing or unreachable data set raises OSError; an invalid split or id raises ValueError.
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
                f"'{path}' has no split '{split}'. Choose one of its splits: {', '.join(saved)}."
            )
        return saved[split]
    if split != "train":
        raise DataError(
            f"'{path}' has the single split 'train', not '{split}'. Set the split to 'train'."
        )
    return saved


def _read_file(path: Path, split: str) -> Dataset:
    reader = FORMATS.get(path.suffix)
    if reader is None:
        raise DataError(
            f"'{path}' ends in '{path.suffix}', but rows are read only from {', '.join(FORMATS)} "
            "files. Convert the file."
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
            "another split. Each line of a jsonl file must be one JSON object."
        )
    return DataError(
        f"'{path}' is not a local file or folder ({Path(path).absolute()} does not exist), and no "
        f"data set of this name with a split '{split}' could be loaded from the hub: {reason}. "
        "Check the path, or the hub id."
    )
