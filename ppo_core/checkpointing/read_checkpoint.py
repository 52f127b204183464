"""Read checkpoints: folders with all state that the next update needs, without pickle.

    output_dir/checkpoint-<step>/
        model.safetensors, config.json, ...   the policy in transformers' format
        <group>.safetensors                   critic, generators, ...
        <group>-<rank>.safetensors            one process's tensors of a group
        trainer_state.json, <other>.json      state other than tensors
        manifest.json                         size and SHA-256 of all other files, written last

Each process writes its own files into a hidden folder, and computes their digests. When the folder
is complete, one process renames it. A folder without a manifest is not a checkpoint. If the
processes write to several disks, each disk gets only some of the files. Before a run resumes, the
missing files must be copied to each disk.
"""

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import safe_open
from torch import Tensor

from ppo_core.checkpointing.disks import find_mount
from ppo_core.checkpointing.folders import FOLDER_NAME, MANIFEST, STATE, finished_checkpoints
from ppo_core.distributed.exchange_objects import ProcessGroup
from ppo_core.errors import TrainingError
from ppo_core.io.text_files import parse_json
from ppo_core.io.validation import read_record

JSON = Any
"""A value that json writes and reads back unchanged: no tuples, and only strings as keys."""

Tensors = Mapping[str, Tensor]

Forms = Mapping[str, Any]
"""Regular expression for names of JSON files -> type that the content of these files must have."""

ANY_FORM: Forms = {}

ALONE = ProcessGroup()

logger = logging.getLogger(__name__)


class _Manifest(BaseModel):
    files: dict[str, dict[str, Any]]


def current_name(name: str) -> str:
    """Return a parameter's current name; earlier versions wrote `critic.backbone.*`."""
    return re.sub(r"^critic\.backbone\.", "critic.model.", name)


def _with_current_names(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    return {current_name(name): value for name, value in pairs}


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of several safetensors files by name; each tensor is read when it is accessed."""

    def __init__(self, files: list[Path]) -> None:
        """Open the files."""
        opened: list[Any] = [safe_open(file, "pt") for file in files]
        self._stored = {
            current_name(name): (file, name)
            for file in opened
            for name in file.keys()  # noqa: SIM118
        }

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor, on the CPU."""
        file, stored_name = self._stored[name]
        tensor: Tensor = file.get_tensor(stored_name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._stored)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._stored)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match its manifest."""

    folder: Path
    state: JSON
    """The content of trainer_state.json."""

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        """Return the tensors of a group from the files of all processes; empty without a file."""
        name = re.compile(rf"{re.escape(group)}(-\d+)?\.safetensors")
        files = sorted(path for path in self.folder.iterdir() if name.fullmatch(path.name))
        return StoredTensors(files)

    def document(self, name: str) -> JSON:
        """Return the content of a JSON file."""
        return parse_json((self.folder / name).read_bytes())


def read_checkpoint(
    folder: Path, peers: ProcessGroup = ALONE, forms: Forms = ANY_FORM
) -> Checkpoint:
    """Verify every file of a checkpoint against its manifest.

    The processes of a machine divide the files among themselves. A JSON file must also have the
    form in `forms`, because somebody may have changed both the file and the manifest.

    Raises:
        TrainingError: the checkpoint is unfinished, a file is missing, truncated or changed, or a
            JSON file has another form. Raised in all processes.
    """
    ranks = find_mount(folder, peers).ranks
    share = slice(ranks.index(peers.rank), None, len(ranks))
    for damage in peers.exchange(_find_damage(folder, share, forms)):
        if damage is not None:
            raise _damaged(damage)
    try:
        state = parse_json((folder / STATE).read_bytes(), object_pairs_hook=_with_current_names)
    except ValueError as error:
        raise _damaged(f"'{folder / STATE}' is damaged: {error}") from error
    return Checkpoint(folder, state)


def _damaged(damage: str) -> TrainingError:
    return TrainingError(
        f"{damage}. A run that continued from a damaged checkpoint would give other results. "
        "Resume from an earlier checkpoint, or restore this one from a copy."
    )


def read_newest(
    output_dir: str | Path, peers: ProcessGroup = ALONE, forms: Forms = ANY_FORM
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint; None if there is no checkpoint.

    Log a warning for each damaged checkpoint that is skipped.

    Raises:
        TrainingError: all checkpoints are damaged; the message describes each damage.
    """
    damaged = []
    # Exchange names instead of paths, because the paths on several disks may differ.
    for name in peers.of_main([path.name for path in checkpoint_folders(output_dir)]):
        folder = Path(output_dir) / name
        try:
            return read_checkpoint(folder, peers, forms)
        except TrainingError as error:
            damaged.append(str(error))
            if peers.is_main:
                logger.warning("Skipping '%s' and trying the previous one. %s", folder, error)
    if damaged:
        raise TrainingError(
            f"All checkpoints in '{output_dir}' are damaged:\n"
            + "\n".join(damaged)
            + "\nRestore a checkpoint from a copy, or move all of them away to start a new run."
        )
    return None


def checkpoint_folders(output_dir: str | Path) -> list[Path]:
    """Return all folders with a checkpoint's name, finished or not, by descending step."""
    found = finished_checkpoints(output_dir)
    unfinished = {
        int(match[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := FOLDER_NAME.fullmatch(path.name)) and not (path / MANIFEST).is_file()
    }
    by_step = unfinished | found
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def _find_damage(folder: Path, share: slice, forms: Forms) -> str | None:
    """Describe the damage in a slice of a checkpoint's files; None if there is no damage."""
    manifest = folder / MANIFEST
    if not folder.is_dir():
        return f"There is no folder '{folder}'"
    if not manifest.is_file():
        return f"'{folder}' has no {MANIFEST}, so it is not a checkpoint or was never finished"
    try:
        files: dict[str, JSON] = read_record(parse_json(manifest.read_bytes()), _Manifest).files
        if STATE not in files:
            raise ValueError(f"files.{STATE} is missing")
        for name in sorted(files)[share]:
            path = folder / name
            if damage := _find_change(path, files[name]) or _find_other_form(path, forms):
                return damage
    except ValueError as error:
        return f"'{manifest}' is damaged: {error}"
    except OSError as error:
        return f"'{folder}' cannot be read: {error}"
    return None


def _find_change(path: Path, expected: JSON) -> str | None:
    if not path.is_file():
        return f"'{path}' is missing"
    if (actual := manifest_entry(path)) != expected:
        return (
            f"'{path}' has changed since it was written: {actual}, but {MANIFEST} lists {expected}"
        )
    return None


def _find_other_form(path: Path, forms: Forms) -> str | None:
    """Describe how a JSON file deviates from its required form; None if it has this form."""
    for pattern, form in forms.items():
        if re.fullmatch(pattern, path.name):
            try:
                read_record(parse_json(path.read_bytes()), form)
            except ValueError as error:
                return f"'{path}' is damaged: {error}"
    return None


def manifest_entry(path: Path) -> dict[str, int | str]:
    """Return the entry of a file in the manifest: its size and SHA-256."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }
