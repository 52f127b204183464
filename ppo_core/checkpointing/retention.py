"""Remove old checkpoints of a run, and rename abandoned checkpoints."""

import shutil
from pathlib import Path

from ppo_core.checkpointing.folders import FOLDER_NAME, finished_checkpoints
from ppo_core.errors import TrainingError

SUPERSEDED = ".superseded"
"""Suffix of abandoned checkpoints.

If a run is resumed from an earlier step, its next checkpoint makes all checkpoints of later steps
abandoned."""


def rename_superseded(newest: Path) -> None:
    """Rename checkpoints of later steps, so that no run resumes from them."""
    for step, path in finished_checkpoints(newest.parent).items():
        if step > step_of(newest):
            aside = path.with_name(f"checkpoint-{step}{SUPERSEDED}")
            remove_folder(aside)
            path.rename(aside)


def remove_old(newest: Path, keep: int | None) -> None:
    """Remove all but the `keep` newest checkpoints, and the leftovers of killed runs.

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
    excess = 0 if keep is None else max(0, len(found) - keep)
    for step in sorted(found)[:excess]:
        remove_folder(found[step])


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
        doomed = folder.with_name(f".{folder.name}.partial-removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
