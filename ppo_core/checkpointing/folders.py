"""Find folders of checkpoints and policies by their names; this module does not import torch."""

import re
from pathlib import Path

MANIFEST = "manifest.json"
"""The last file that is written into a checkpoint."""

STATE = "trainer_state.json"
"""File of a checkpoint with all state other than tensors."""

POLICIES = "policies"
"""Subfolder of `output_dir` for the policies of `save_policies`; the name of each policy's folder
is the number of its update."""

FOLDER_NAME = re.compile(r"checkpoint-(\d+)(\.old)?")


def finished_checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Return finished checkpoints by step; a `.old` folder counts only if its step has no other."""
    found: dict[int, Path] = {}
    for path in sorted(Path(output_dir).glob("checkpoint-*"), reverse=True):
        match = FOLDER_NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found[int(match[1])] = path  # overwrites .old, which the reversed order puts first
    return found


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the finished checkpoint of the highest step; None without a finished checkpoint."""
    found = finished_checkpoints(output_dir)
    return found[max(found)] if found else None


def saved_policies(folder: Path) -> dict[int, Path]:
    """Return the policies in the folder POLICIES by number of the update, in ascending order."""
    found = {int(path.name): path for path in folder.glob("*") if path.name.isdecimal()}
    return dict(sorted(found.items()))
