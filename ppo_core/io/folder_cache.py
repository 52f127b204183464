"""A cache of folders, each named by a digest of its inputs."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from ppo_core.io.atomic_files import write_atomically

MADE_FILE = "made.json"
"""File in a cached folder with the folder's name, the digest of the other files, and the values
that `make` returned."""

LIBRARIES = ("torch", "transformers")
"""Libraries whose versions are part of the digest of the inputs."""


@dataclass(frozen=True)
class Cached:
    """A folder of the cache."""

    path: Path
    """Path of the folder."""

    reused: bool
    """Whether the folder was already in the cache."""

    values: dict[str, Any]
    """Values that `make` returned."""

    digest: str
    """Digest of the folder, as `digest_of_folder` returns it."""


@dataclass(frozen=True)
class Made:
    """Content of `MADE_FILE`; see `Cached` for digest and values."""

    name: str
    """Name of the folder; empty in files of older versions."""

    digest: str
    values: dict[str, Any]

    @classmethod
    def parse(cls, text: bytes) -> "Made":
        """Return the content of a file.

        Raises:
            ValueError: the text is not JSON.
            KeyError, TypeError: the JSON has another form.
        """
        made = json.loads(text)
        return cls(digest=made["digest"], values=made["values"], name=made.get("name", ""))


class Copies(Protocol):
    """Copies of cached folders, which other machines and later runs share."""

    def fetch(self, folder: Path) -> None:
        """Create the folder from its copy, if there is one."""

    def publish(self, folder: Path) -> None:
        """Make a copy of the folder, unless there is one."""


_COPIES: ContextVar[Copies | None] = ContextVar("copies", default=None)


@contextmanager
def sharing(copies: Copies) -> Iterator[None]:
    """Make `make_once` fetch and publish copies inside the context."""
    token = _COPIES.set(copies)
    try:
        yield
    finally:
        _COPIES.reset(token)


def make_once(
    root: Path,
    name: str,
    inputs: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, Any] | None],
    *,
    shared: bool = False,
) -> Cached:
    """Return the cached folder for `inputs`; call `make` to fill the folder if it is missing.

    `make` fills a temporary folder, which is then renamed. Therefore a folder with the final name
    is complete even if a process was killed. A folder is made again if its files were changed
    later, or if it is a copy that was made under another name.

    Args:
        root: folder of the cache.
        name: first part of the folder's name.
        inputs: everything that decides the result; must be serializable as JSON.
        make: function that fills the given folder and returns values that are serializable as JSON.
        shared: whether a copy of the folder is fetched and published inside `sharing`.
    """
    folder = folder_of(root, name, inputs)
    copies = _COPIES.get() if shared else None
    if copies and not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        copies.fetch(folder)
    if folder.is_dir():
        if is_made(folder):
            return _cached(folder, reused=True)
        print(
            f"Warning: {name}: {folder} was changed after it was made, so it is made again",
            file=sys.stderr,
        )
        _remove(folder)
    # Processes of several machines may share the cache, and may have equal process ids.
    unfinished = root / f".{folder.name}.{uuid4().hex}"
    unfinished.mkdir(parents=True)
    try:
        values = dict(make(unfinished) or {})
        made = Made(folder.name, digest_of_folder(unfinished), values)
        write_atomically(unfinished / MADE_FILE, json.dumps(vars(made)))
        publish_folder(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if copies:
        copies.publish(folder)
    return _cached(folder, reused=False)


def folder_of(root: Path, name: str, inputs: Mapping[str, Any]) -> Path:
    """Return the path of the folder that `make_once` fills; the folder may not exist yet."""
    everything = {**inputs, "libraries": {library: version(library) for library in LIBRARIES}}
    return root / f"{name}-{digest_of(everything)}"


def digest_of(value: Any) -> str:
    """Return a short digest of a value that is serializable as JSON."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_code(*modules: str) -> str:
    """Return a short digest of the source of modules, without importing them."""
    return digest_of([_source_of(name) for name in modules])


def digest_of_folder(folder: Path) -> str:
    """Return a short digest of the names and contents of a folder's files except `MADE_FILE`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MADE_FILE:
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(bytes.fromhex(digest_of_file(path)))
    return digest.hexdigest()[:16]


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's content; an unchanged file is read only once per process.

    Raises:
        OSError: the file cannot be read.
    """
    state = path.stat()
    return _digest_of_content(
        path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    )


@cache
def _digest_of_content(path: Path, state: tuple[int, ...]) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source_of(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    return Path(spec.origin).read_text(encoding="utf-8")


def _remove(folder: Path) -> None:
    """Remove a folder that another process may remove or replace at the same time."""
    stale = folder.with_name(f".{folder.name}.{uuid4().hex}")
    with suppress(OSError):
        folder.rename(stale)
    shutil.rmtree(stale, ignore_errors=True)


def publish_folder(unfinished: Path, folder: Path) -> None:
    """Rename the folder, unless another run has created the target folder meanwhile."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link to a file, or a copy of the file if the disk allows no hard link.

    Raises:
        OSError: `target` exists, or the file cannot be copied.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _cached(folder: Path, *, reused: bool) -> Cached:
    made = _read_made(folder)
    return Cached(folder, reused, made.values, made.digest)


def is_made(folder: Path) -> bool:
    """Return whether a folder was made under its name and is unchanged, so it can be reused."""
    try:
        made = _read_made(folder)
        return made.name == folder.name and made.digest == digest_of_folder(folder)
    # The file is unreadable, is not a JSON object of this form, or has the form of older versions.
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_made(folder: Path) -> Made:
    return Made.parse((folder / MADE_FILE).read_bytes())
