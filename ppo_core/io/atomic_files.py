"""Atomic writes of files: after a crash, a file has its full old or its full new content."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

from ppo_core.errors import ConfigError, TrainingError, reason_of

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk, of an exceeded quota, and of a file that is too large."""


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Create or replace a file atomically: write a hidden temporary file, then rename it.

    Several machines may write the same path at the same time; the last rename wins.

    Args:
        path: the file, in an existing folder.
        content: bytes, or text to be encoded as UTF-8.
        durable: sync the file and its folder to disk before returning, so that the new content
            survives a power failure. Otherwise it survives only a crash of the process.

    Raises:
        OSError: the file cannot be written; the error names `path`. An existing file is unchanged,
            and the temporary file is removed.
    """
    with replacing(path, durable=durable) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield the hidden temporary file that becomes `path` after the block; see `write_atomically`.

    After an error in the block, `path` is unchanged.

    Raises:
        OSError: see `write_atomically`.
    """
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield unfinished
        if durable:
            sync_to_disk(unfinished)
        unfinished.replace(path)
    except OSError as error:
        # The error of a full disk names no file.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        # After the rename, this file is gone. After a failed write, only the write's error matters.
        with suppress(OSError):
            unfinished.unlink()
    if durable:
        sync_to_disk(path.parent)


def is_written_in_place(path: Path) -> bool:
    """Return whether a path is a device or a link (/dev/stdout), which a rename would replace."""
    return path.exists() and (path.is_symlink() or not path.is_file())


def is_stdout(path: Path) -> bool:
    """Return whether a path is the standard output of this process, such as /dev/stdout.

    A file that is the standard output must not be opened a second time: each of the two open files
    has its own position.
    """
    return path.exists() and os.path.samestat(path.stat(), os.fstat(1))


def sync_to_disk(path: Path) -> None:
    """Sync a file's content, or a folder's list of names, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_writable(folder: Path, setting: str) -> None:
    """Create a folder if it is missing; raise if no file can be written into it.

    Call this before a training, so that its result is not lost because of an unwritable folder.
    `setting` is the name of the folder's setting, for the message.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    # ValueError: the path contains a null character.
    except (OSError, ValueError) as error:
        raise unwritable(folder, setting, reason_of(error)) from error


def require_creatable(folder: Path, setting: str) -> None:
    """Raise if a folder cannot be created or written. Unlike `require_writable`, create nothing.

    Raises:
        ConfigError: the folder, or the nearest folder above it that exists, cannot be written.
    """
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    # ValueError: the path contains a null character.
    except (OSError, ValueError) as error:
        raise unwritable(folder, setting, reason_of(error)) from error
    if not nearest.is_dir():
        raise unwritable(folder, setting, f"{str(nearest)!r} is a file")
    if not os.access(nearest, os.W_OK):
        raise unwritable(folder, setting, f"{str(nearest)!r} is read-only")


def unwritable(folder: Path, setting: str, reason: str) -> ConfigError:
    """Return the error for an unwritable folder; `setting` is the name of the folder's setting."""
    return ConfigError(
        f"{setting}: nothing can be written into {str(folder)!r} ({reason}), so all results would "
        "be lost. Choose a writable folder."
    )


@contextmanager
def explained_writes(path: Path) -> Iterator[None]:
    """Turn an error of writing the file or folder `path` into a TrainingError that names it.

    Raises:
        TrainingError: the disk is full, or `path` cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"'{path}' cannot be written: {error}. Incomplete files are ignored. Free disk space "
            "or choose another folder, then start again. A run with checkpoints can resume."
        ) from error


@contextmanager
def explained_full_disk() -> Iterator[None]:
    """Turn the error of a full disk, wherever it was raised, into a TrainingError.

    Raises:
        TrainingError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise TrainingError(
            f"A file cannot be written: {error}. Free disk space, and start or resume the run."
        ) from error
