"""Download the files of a version from MLflow's artifact store, and check each file."""

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository
from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository

from ppo_core.errors import ModelError
from ppo_core.errors.deadline import answer_within

from .manifest import (
    MANIFEST,
    check_file,
    check_list,
    check_name,
    check_path,
    check_plain,
    read_manifest,
    refusal,
)

SLOWEST_BYTES_PER_SECOND = 1_000_000
"""Minimum rate of a download; a slower download is abandoned."""


def prepare_mlflow() -> None:
    """Set environment variables of MLflow's client, unless the service has set them."""
    # If redirects are refused, only the registry that the service names can answer.
    os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")
    # A progress bar for each file would clutter the log of a service.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def open_store(found: ModelVersion, what: str, timeout: float) -> ArtifactRepository:
    """Return the artifact store of a version; `what` names the version in error messages.

    Raises:
        ModelError: MLflow does not name the store within `timeout` seconds, or the store cannot
            be opened.
    """

    def address() -> str:
        return MlflowClient().get_model_version_download_uri(found.name, found.version)

    return open_store_at(address, what, timeout)


def open_store_at(address: Callable[[], str], what: str, timeout: float) -> ArtifactRepository:
    """Return the artifact store at an address of MLflow, which may begin with models:/ or runs:/.

    Raises:
        ModelError: see `open_store`.
    """

    def find() -> ArtifactRepository:
        store = get_artifact_repository(address())
        while isinstance(store, ModelsArtifactRepository | RunsArtifactRepository):
            store = store.repo  # the store that a models:/ or runs:/ address resolves to
        return store

    with asking_the_store(what):
        return answer_within(timeout, find)


def download(
    store: ArtifactRepository, folder: Path, digest: str, what: str, timeout: float
) -> Mapping[str, str]:
    """Download the files of the manifest into `folder`, and check each file after its download.

    JSON files are downloaded before the weights.

    Args:
        store: artifact store of the version.
        folder: an empty folder.
        digest: SHA-256 of the manifest.
        what: name of the version in error messages.
        timeout: maximum seconds for each answer of the store. A file may take
            size / SLOWEST_BYTES_PER_SECOND more seconds.

    Returns:
        The SHA-256 of each file, by path.

    Raises:
        ModelError: the store cannot be read, or a file is refused.
    """
    sizes = dict(_walk(store, what, timeout))

    def fetch(path: str) -> None:
        seconds = timeout + sizes[path] / SLOWEST_BYTES_PER_SECOND
        _fetch(store, path, folder, what, seconds)

    if MANIFEST not in sizes:
        raise refusal(what, f"its artifacts hold no {MANIFEST}")
    fetch(MANIFEST)
    files = read_manifest(folder, digest, what)
    check_list(sizes, files, what)
    for path in sorted(files, key=lambda path: (not path.endswith(".json"), path)):
        fetch(path)
        check_file(folder, path, files[path], what)
    return files


def download_file(
    store: ArtifactRepository, path: str, folder: Path, digest: str, what: str, timeout: float
) -> bool:
    """Download one file of the manifest into `folder` and check it.

    For the arguments see `download`. Return False if the manifest has no such file.

    Raises:
        ModelError: the store cannot be read, or the manifest or the file is refused.
    """
    _fetch(store, MANIFEST, folder, what, timeout)
    files = read_manifest(folder, digest, what)
    if path not in files:
        return False
    _fetch(store, path, folder, what, timeout)
    check_file(folder, path, files[path], what)
    return True


def _walk(store: ArtifactRepository, what: str, timeout: float) -> Iterator[tuple[str, int]]:
    """Yield the path and size of each file in the store; raise at the first refused path."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with asking_the_store(what):
            entries = answer_within(timeout, store.list_artifacts, folder or None)
        for entry in entries:
            check_path(entry.path, what)
            if posixpath.dirname(entry.path) != folder:
                raise refusal(what, f"the store lists {entry.path!r} in the folder {folder!r}")
            if isinstance(store, LocalArtifactRepository):
                check_plain(Path(store.artifact_dir), entry.path, what)
            if entry.is_dir:
                folders.append(entry.path)
            else:
                check_name(entry.path, what)
                yield entry.path, entry.file_size or 0


def _fetch(store: ArtifactRepository, path: str, folder: Path, what: str, seconds: float) -> None:
    with asking_the_store(what):
        answer_within(seconds, store.download_artifacts, path, str(folder))


@contextmanager
def asking_the_store(what: str) -> Iterator[None]:
    """Turn every error of the store into a ModelError."""
    try:
        yield
    # Each store raises its client library's errors, which have no common base class.
    except Exception as error:
        raise ModelError(
            f"The artifacts of {what} cannot be read: {error}. No file was "
            "loaded. Check the store's address, the credentials and the free disk space."
        ) from None  # a traceback would show the address with its password
