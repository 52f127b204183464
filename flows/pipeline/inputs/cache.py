"""A cache of folders, each named by a digest of its inputs."""

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

from ppo_core.data.atomic_files import write_atomically
from ppo_core.errors import ModelError

MADE_FILE = "made.json"
"""File in a cached folder: the digest of its other files, and the metrics that `make` returned."""

LIBRARIES = ("torch", "transformers")
"""Libraries whose versions are part of the digest."""


@dataclass(frozen=True)
class Cached:
    """A folder of the cache."""

    path: Path
    """Path of the folder."""

    reused: bool
    """Whether the folder was already in the cache."""

    metrics: dict[str, float]
    """Metrics that `make` returned."""


def make_once(
    root: Path,
    name: str,
    inputs: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, float] | None],
) -> Cached:
    """Return the cached folder for `inputs`; call `make` to fill the folder if it is missing.

    `make` fills a temporary folder, which is then renamed. So a folder with the final name is
    complete even if a process was killed. A folder whose files were changed since is made again.

    Args:
        root: folder of the cache.
        name: first part of the folder's name.
        inputs: everything that decides the result; must be serializable as JSON.
        make: function that fills the given folder and returns metrics.
    """
    everything = {**inputs, "libraries": {library: version(library) for library in LIBRARIES}}
    folder = root / f"{name}-{digest_of(everything)}"
    if folder.is_dir():
        if _is_unchanged(folder):
            print(f"{name}: reused {folder}", flush=True)
            return Cached(folder, True, _read_made(folder)["metrics"])
        print(f"{name}: {folder} was changed after it was made, so it is made again", flush=True)
        shutil.rmtree(folder)
    unfinished = root / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        metrics = make(unfinished) or {}
        made = {"digest": digest_of_folder(unfinished), "metrics": metrics}
        write_atomically(unfinished / MADE_FILE, json.dumps(made))
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{name}: made {folder}", flush=True)
    return Cached(folder, False, _read_made(folder)["metrics"])


def digest_of(value: Any) -> str:
    """Return a short digest of a value that is serializable as JSON."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_code(*modules: str) -> str:
    """Return a short digest of the source of modules, without importing them."""
    return digest_of([_source_of(name) for name in modules])


def digest_of_folder(folder: Path) -> str:
    """Return a short digest of the names and contents of the files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MADE_FILE:
            digest.update(str(path.relative_to(folder)).encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def require_unchanged(folder: str, digest: str, what: str) -> None:
    """Raise if the files of a folder are not those of its digest; `what` names the folder.

    Raises:
        ModelError: a file was changed, added or removed.
    """
    if (found := digest_of_folder(Path(folder))) != digest:
        raise ModelError(
            f"{what} in '{folder}' was changed after it was written: its digest is {found}, not "
            f"{digest}. Answers and version would be those of another model. Find out which "
            "program writes there, and start the run again."
        )


def digest_of_model(path: str) -> str:
    """Return a digest of a folder's contents, or the id and commit of a model on the hub."""
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
    """Rename the folder, unless another run has created the target folder meanwhile."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _is_unchanged(folder: Path) -> bool:
    try:
        return bool(_read_made(folder)["digest"] == digest_of_folder(folder))
    # An unreadable file, another form of JSON, or the form of earlier versions.
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_made(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / MADE_FILE).read_text(encoding="utf-8"))
    return made
