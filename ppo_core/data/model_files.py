"""Write a model and its tokenizer; replace old files only after all new files are written."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from ppo_core.io.atomic_files import explained_writes, sync_to_disk

UNFINISHED = ".unfinished"
"""Subfolder into which `replaced_together` writes all files before it moves them."""


@contextmanager
def replaced_together(folder: Path) -> Iterator[Path]:
    """Yield an empty folder; after the block, move the new files to the same paths in `folder`.

    If the block fails, the files in `folder` are unchanged. Files in `folder` for which there is no
    new file are kept.

    Raises:
        TrainingError: a file cannot be written, for example because the disk is full.
    """
    unfinished = folder / UNFINISHED
    with explained_writes(folder), safetensors_as_os_errors():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            files = [path for path in unfinished.rglob("*") if path.is_file()]
            for path in files:
                sync_to_disk(path)
            for path in files:
                target = folder / path.relative_to(unfinished)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def safetensors_as_os_errors() -> Iterator[None]:
    """Turn an error of safetensors, which is no OSError, into an OSError.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer in transformers' format.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    try:
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(folder)) from error
    except Exception as error:
        # The library `tokenizers` raises plain `Exception`, not a subclass.
        if type(error) is not Exception:
            raise
        raise OSError(f"The tokenizer was not written to '{folder}': {error}") from error
