"""A cache of folders, each named by a digest of everything that made it."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MADE_FILE = "made.json"
"""Beside the files of a cached folder: what its maker returned."""

LIBRARIES = ("torch", "transformers")
"""Libraries whose version decides what a training makes."""


@dataclass(frozen=True)
class Cached:
    """A folder of the cache."""

    path: Path
    """Where it is."""

    reused: bool
    """Whether it was there before."""

    metrics: dict[str, float]
    """What its maker returned when it was made."""


def make_once(
    root: Path,
    name: str,
    inputs: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, float] | None],
) -> Cached:
    """The folder that `make` fills from `inputs`, made now or taken from the cache.

    It is filled under a temporary name and renamed when it is complete, so a folder with its
    final name is whole, whoever was interrupted.

    Args:
        root: folder of the cache.
        name: what is made, the first part of the folder's name.
        inputs: everything that decides the result, as JSON can hold it.
        make: fills the folder it is given; returns numbers worth keeping.
    """
    everything = {**inputs, "libraries": {library: version(library) for library in LIBRARIES}}
    folder = root / f"{name}-{digest_of(everything)}"
    if folder.is_dir():
        print(f"{name}: reused {folder}", flush=True)
        return Cached(folder, True, _read_metrics(folder))
    unfinished = root / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        metrics = make(unfinished) or {}
        (unfinished / MADE_FILE).write_text(json.dumps(metrics), encoding="utf-8")
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{name}: made {folder}", flush=True)
    return Cached(folder, False, _read_metrics(folder))


def digest_of(value: Any) -> str:
    """A short digest of a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_code(*modules: str) -> str:
    """A short digest of the source of modules by their names; none is imported for it."""
    return digest_of([_source_of(name) for name in modules])


def digest_of_folder(folder: Path) -> str:
    """A short digest of the names and contents of the files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MADE_FILE:
            digest.update(str(path.relative_to(folder)).encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def digest_of_model(path: str) -> str:
    """A digest of the contents of a folder, or the commit of a model of the hub."""
    folder = Path(path)
    if folder.is_dir():
        return digest_of_folder(folder)

    from ppo_core.models.loading import load_config

    return f"{path}@{load_config(path)._commit_hash}"


def _source_of(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    return Path(spec.origin).read_text(encoding="utf-8")


def _publish(unfinished: Path, folder: Path) -> None:
    """Rename; a folder that another run completed meanwhile is as good."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _read_metrics(folder: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((folder / MADE_FILE).read_text(encoding="utf-8"))
    return metrics
