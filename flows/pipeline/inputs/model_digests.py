"""Compute digests of models; a digest identifies a model and reveals changed files."""

from pathlib import Path

from pipeline.storage.workspace import original_names
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


def require_recorded(path: str, digest: str, what: str) -> None:
    """Raise if a model does not have the digest that the run has recorded for it.

    Args:
        path: folder or hub id of the model.
        digest: the recorded digest, see `digest_of_model`.
        what: name of the model in the message.

    Raises:
        ModelError: the model was changed.
    """
    if (found := digest_of_model(path)) != digest:
        raise ModelError(
            f"The {what} '{original_names(path)}' was changed after this run read it: its digest "
            f"is {found}, not {digest}. If the run continued, its records would have the digest of "
            "the earlier files. Start a new run: python flows/rlhf.py run. Models that are already "
            "trained are reused."
        )


def digest_of_model(path: str) -> str:
    """Return a digest of a folder's contents, or the id and commit of a model on the hub."""
    folder = Path(path)
    if folder.is_dir():
        return digest_of_folder(folder)

    from ppo_core.models.loading import commit_of

    return f"{split_revision(path)[0]}@{commit_of(path)}"
