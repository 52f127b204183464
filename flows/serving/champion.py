"""Download the champion of a registered model, verify each of its files, and load the model.

    from flows.champion import load_champion

    champion = load_champion("rlhf-policy")
    question = champion.tokenizer("Hello", return_tensors="pt").to(champion.model.device)
    champion.model.generate(**question)

This package imports only two other parts of the project: `ppo_core.errors` and
`ppo_core.config.placement`. Loading a model also imports `ppo_core.models.loading`, which the flow
uses to load and check its models.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from sqlalchemy.exc import SQLAlchemyError

from ppo_core.config.placement import Precision, placement_for_reading
from ppo_core.errors import ModelError, PPOError, TrainingError
from ppo_core.errors.deadline import ANSWER_SECONDS, answer_within

from .artifact_store import download, open_store, prepare_mlflow
from .database import check_database
from .manifest import MANIFEST, MANIFEST_TAG, check_folder, is_digest, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CACHE = Path.home() / ".cache" / "rlhf-flow" / "champions"
"""Default folder for downloaded versions; deleting it is safe."""

ABANDONED_SECONDS = 24 * 3600
"""Age at which the files of an interrupted download are deleted."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """A downloaded version whose files have all been verified."""

    name: str
    """Name of the registered model."""

    version: str
    """Version number."""

    folder: Path
    """Folder with model/, components/tokenizer/ and the other files of the version."""

    manifest: str
    """SHA-256 of the manifest."""


@dataclass(frozen=True)
class Champion:
    """A loaded version of a registered model."""

    name: str
    """Name of the registered model."""

    version: str
    """Version number."""

    model: "PreTrainedModel"
    """A causal language model in evaluation mode, on a GPU if there is one."""

    tokenizer: "PreTrainedTokenizerBase"
    """Tokenizer of the model."""


def champion_version(name: str, alias: str = "champion", *, timeout: float = ANSWER_SECONDS) -> str:
    """Return the version that the alias points at, with a single request to the registry.

    Raises:
        ModelError: the registry does not answer within `timeout` seconds, or has no such model or
            alias.
    """
    return str(_find_version(name, alias, None, timeout).version)


def load_champion(
    name: str,
    *,
    alias: str = "champion",
    version: str | int | None = None,
    cache: Path | str | None = None,
    timeout: float = ANSWER_SECONDS,
    precision: Precision | None = None,
) -> Champion:
    """Download a version, verify all its files, and load it as the flow loads a policy.

    A registered version must pass the same checks as a policy that a user names.

    Args:
        name: name of the registered model.
        alias: alias of the version to load; ignored if `version` is given.
        version: version number.
        cache: folder for downloaded versions; None for `CACHE`.
        timeout: maximum seconds for each answer of the registry and of the store; a file may take
            one more second per megabyte.
        precision: `fp32`, `bf16`, or `auto` (bf16 on a GPU that supports it, otherwise fp32); None
            for the precision of the files.

    Raises:
        ModelError: `fetch_champion` failed, or the verified files are refused or cannot be loaded.
    """
    # Imported here, because a service that only asks for the version needs no transformers.
    import torch

    from ppo_core.models.loading import load_policy, load_tokenizer

    fetched = fetch_champion(name, alias=alias, version=version, cache=cache, timeout=timeout)
    what = f"Version {fetched.version} of '{name}'"
    model, tokenizer = fetched.folder / "model", fetched.folder / "components" / "tokenizer"
    # Without config.json, transformers would load the unverified base model of an adapter.
    if not ((model / "config.json").is_file() and tokenizer.is_dir()):
        raise refusal(what, "it has no model/config.json or no components/tokenizer")
    placement = placement_for_reading(precision or "auto")
    dtype = "auto" if precision is None else placement.dtype
    try:
        return Champion(
            name,
            fetched.version,
            load_policy(model, dtype=dtype).to(placement.device),  # type: ignore[arg-type]
            load_tokenizer(tokenizer),
        )
    except (PPOError, torch.OutOfMemoryError) as error:
        next_move = (
            "Point the alias at another version, or install the packages in the version's "
            "requirements.txt."
        )
        # `load_policy` raises a TrainingError if memory is full.
        if isinstance(error, TrainingError | torch.OutOfMemoryError):
            next_move = "Free memory of the GPU or of the machine, or load it in precision='bf16'."
        raise ModelError(
            f"{what} is unchanged since it was registered, but it cannot be loaded: {error} "
            f"{next_move}"
        ) from error


def fetch_champion(
    name: str,
    *,
    alias: str = "champion",
    version: str | int | None = None,
    cache: Path | str | None = None,
    timeout: float = ANSWER_SECONDS,
) -> Fetched:
    """Download a version and verify each file against the manifest.

    The digest of the manifest must be equal to the tag of the version. The list of files in the
    store must match the manifest, and the digest of each file must be the digest in the manifest.
    Files are downloaded to a temporary folder, which is renamed when it is complete. A version in
    the cache is verified again, and is downloaded again only if a file has changed.

    Args:
        name: name of the registered model.
        alias: alias of the version to download; ignored if `version` is given.
        version: version number.
        cache: folder for downloaded versions; None for `CACHE`.
        timeout: maximum seconds for each answer of the registry and of the store; a file may take
            one more second per megabyte.

    Raises:
        ModelError: the registry or the store does not answer, the version does not exist, or a
            file is refused; the message names the file and the reason.
    """
    found = _find_version(name, alias, version, timeout)
    what = f"Version {found.version} of '{name}'"
    digest = manifest_digest(found.tags, MANIFEST_TAG, what)
    folder = fetch_verified(
        lambda: open_store(found, what, timeout), digest, Path(cache or CACHE), what, timeout
    )
    return Fetched(name, str(found.version), folder, digest)


def fetch_verified(
    open_files: Callable[[], ArtifactRepository],
    digest: str,
    cache: Path,
    what: str,
    timeout: float,
) -> Path:
    """Return the cache folder with the files of a manifest; download missing or changed files.

    Args:
        open_files: returns the store of the files; called only if the files must be downloaded.
        digest: SHA-256 of the manifest, and name of the folder.
        cache: folder for downloads.
        what: name of the files in error messages.
        timeout: see `fetch_champion`.

    Raises:
        ModelError: see `fetch_champion`.
    """
    folder = cache / digest
    try:
        if not _is_intact(folder, digest):
            _fetch_into(folder, open_files, digest, what, timeout)
    except OSError as error:
        raise ModelError(
            f"{what} cannot be stored in {folder.parent}: {error}. Free disk space, or pass "
            "another folder as `cache`."
        ) from error
    return folder


def _find_version(name: str, alias: str, version: str | int | None, timeout: float) -> ModelVersion:
    prepare_mlflow()

    def ask() -> ModelVersion:
        client = MlflowClient()
        if version is None:
            return client.get_model_version_by_alias(name, alias)
        return client.get_model_version(name, str(version))

    for uri in {mlflow.get_tracking_uri(), mlflow.get_registry_uri()}:
        check_database(uri, must_exist=True)
    try:
        return answer_within(timeout, ask)
    # An ImportError means that the driver of the database is not installed.
    except (MlflowException, SQLAlchemyError, OSError, ImportError) as error:
        registry = mlflow.get_registry_uri()
        code = error.error_code if isinstance(error, MlflowException) else ""
        if version is None and code == "INVALID_PARAMETER_VALUE":
            raise ModelError(
                f"'{name}' has no version with the alias '{alias}' in {registry}: {error} The "
                "aliases of the flow are champion, previous-champion and challenger. Check the "
                "alias, or promote a version with flows/registry.py."
            ) from None  # a traceback would show the address with its password
        if code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise ModelError(
                f"{registry} does not have {f'version {version} of ' * (version is not None)}"
                f"'{name}': {error}. Check the name, or set MLFLOW_TRACKING_URI to the registry "
                "that holds the model."
            ) from None
        raise ModelError(
            f"The MLflow registry at {registry} gives no answer: {error}. Set MLFLOW_TRACKING_URI "
            "to a running registry. If the error names a missing package, install it."
        ) from None


def manifest_digest(tags: Mapping[str, str], tag: str, what: str) -> str:
    """Return the digest of a manifest from the tag of a version.

    Raises:
        ModelError: there is no such tag, or its value is not a digest.
    """
    digest = tags.get(tag)
    if digest is None:
        raise refusal(
            what,
            f"it has no tag '{tag}', so its files cannot be verified; the flow did not register it",
        )
    # The digest becomes the name of a folder in the cache. Any other text could be an unsafe path.
    if not is_digest(digest):
        raise refusal(what, f"its tag '{tag}' is not a SHA-256: {digest!r:.80}")
    return digest


def _is_intact(folder: Path, digest: str) -> bool:
    if not folder.is_dir():
        return False
    try:
        check_folder(folder, digest)
    except ModelError as error:
        _LOG.warning("Downloading a version again, because its cached copy was changed. %s", error)
        return False
    return True


def _fetch_into(
    folder: Path,
    open_files: Callable[[], ArtifactRepository],
    digest: str,
    what: str,
    timeout: float,
) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=".fetching-", dir=folder.parent))
    try:
        files = download(open_files(), unfinished, digest, what, timeout)
        _publish(unfinished, folder, files, digest)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _publish(unfinished: Path, folder: Path, files: Iterable[str], digest: str) -> None:
    """Rename the folder `unfinished` to `folder`.

    If `folder` exists, its files are replaced one by one, because other processes may read them.
    """
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        for path in (*files, MANIFEST):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / path).replace(folder / path)
        _require_repaired(folder, digest)


def _require_repaired(folder: Path, digest: str) -> None:
    try:
        check_folder(folder, digest)
    except ModelError as error:
        raise ModelError(
            f"The files in {folder} differ from the downloaded files. Delete the folder, find out "
            f"which program writes there, and try again. {error}"
        ) from error


def _remove_abandoned(cache: Path) -> None:
    for folder in cache.glob(".fetching-*"):
        with suppress(FileNotFoundError):  # another process may have just renamed it
            if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
