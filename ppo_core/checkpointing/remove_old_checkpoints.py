"""Remove old and abandoned checkpoints, and the leftovers of killed runs."""

import logging
import shutil
from pathlib import Path
from uuid import uuid4

from ppo_core.checkpointing.folders import FOLDER_NAME, finished_checkpoints
from ppo_core.errors import TrainingError

logger = logging.getLogger(__name__)

SUPERSEDED = ".superseded"
"""Suffix of abandoned checkpoints.

If a run is resumed from an earlier step, its next checkpoint makes all checkpoints of later steps
abandoned. See `remove_old_checkpoints` for their removal."""


def rename_superseded(newest: Path) -> None:
    """Rename checkpoints of later steps, so that no run resumes from them."""
    for step, path in finished_checkpoints(newest.parent).items():
        if step > step_of(newest):
            aside = path.with_name(f"checkpoint-{step}{SUPERSEDED}")
            remove_folder(aside)
            path.rename(aside)


def remove_old_checkpoints(newest: Path, keep: int | None) -> None:
    """Remove all but the `keep` newest checkpoints, and the leftovers of killed runs.

    With `keep`, also remove abandoned checkpoints once the run has reached their steps again.
    Leftovers are unfinished hidden folders, and `.old` folders that a newer checkpoint of the same
    step has replaced. Folders `checkpoint-<step>` without a manifest are kept.
    """
    found = finished_checkpoints(newest.parent)
    replaced = [
        path
        for path in newest.parent.glob("checkpoint-*.old")
        if FOLDER_NAME.fullmatch(path.name) and path not in found.values()
    ]
    for leftover in replaced:
        remove_folder(leftover)
    for unfinished in newest.parent.glob(".checkpoint-*.partial*"):
        # A run that lost its lease may still write into the folder, so ignore errors.
        shutil.rmtree(unfinished, ignore_errors=True)
    if keep is None:
        return
    for step in sorted(found)[: max(0, len(found) - keep)]:
        remove_folder(found[step])
    for abandoned in newest.parent.glob(f"checkpoint-*{SUPERSEDED}"):
        number = abandoned.name.removeprefix("checkpoint-").removesuffix(SUPERSEDED)
        if number.isdecimal() and int(number) <= step_of(newest):
            remove_folder(abandoned)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder.

    Raises:
        TrainingError: the name has no step.
    """
    match = FOLDER_NAME.fullmatch(folder.name)
    if match is None or match[2]:
        raise TrainingError(
            f"'{folder}' is not a valid name of a checkpoint, so a resumed run would not find the "
            "folder. Name the folder checkpoint-<step>."
        )
    return int(match[1])


def remove_folder(folder: Path) -> None:
    """Rename and remove a folder, so that a partly removed folder is never read as a checkpoint."""
    if folder.exists():
        removed = folder.with_name(f".{folder.name}.partial-{uuid4().hex}")
        folder.rename(removed)
        # On NFS, a file that a reader has open stays; it is removed after a later checkpoint.
        shutil.rmtree(removed, ignore_errors=True)
        if removed.exists():
            logger.warning("'%s' cannot be removed yet, and fills the disk.", removed)
