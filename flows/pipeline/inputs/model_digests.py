"""Compute digests of models; a digest identifies a model and reveals changed files."""

from pathlib import Path

from ppo_core.config.hub_ids import split_revision
from ppo_core.errors import ModelError
from ppo_core.io.folder_cache import digest_of_folder


def require_unchanged(folder: str, digest: str, what: str) -> None:
    """Raise if the files of a folder do not have the digest `digest`; `what` names the folder.

    Raises:
        ModelError: a file was changed, added or removed.
    """
    if (found := digest_of_folder(Path(folder))) != digest:
        raise ModelError(
            f"{what} in '{folder}' was changed after it was written: its digest is {found}, not "
            f"{digest}. The evaluation and the registered version would use another model than "
            "was written. Find out which program writes there, and start the run again."
        )


def digest_of_model(path: str) -> str:
    """Return a digest of a folder's contents, or the id and commit of a model on the hub."""
    folder = Path(path)
    if folder.is_dir():
        return digest_of_folder(folder)

    from ppo_core.models.loading import commit_of

    return f"{split_revision(path)[0]}@{commit_of(path)}"
