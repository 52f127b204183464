"""Write and read checkpoints: folders with all state that the next update needs, without pickle.

    output_dir/checkpoint-<step>/
        model.safetensors, config.json, ...   the policy in transformers' format
        <group>.safetensors                   critic, generators, ...
        <group>-<rank>.safetensors            one process's tensors of a group
        trainer_state.json, <other>.json      state other than tensors
        manifest.json                         size and SHA-256 of all other files, written last

Each process writes and digests its own files in a hidden folder. When the folder is complete, one
process renames it. A folder without a manifest is not a checkpoint. If the processes write to
several disks, each disk has some of the files. Before a run resumes, each disk must have all files.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ppo_core.checkpointing.disks import Disk
from ppo_core.checkpointing.folders import FOLDER_NAME, MANIFEST, finished_checkpoints
from ppo_core.distributed.process_group import ProcessGroup
from ppo_core.errors import TrainingError
from ppo_core.io.atomic_files import sync_to_disk
from ppo_core.io.text_files import parse_json
from ppo_core.io.validation import read_record

JSON = Any
"""A value that json writes and reads back unchanged: no tuples, and only strings as keys."""

Tensors = Mapping[str, Tensor]

STATE = "trainer_state.json"
SUPERSEDED = ".superseded"
"""Suffix of abandoned checkpoints, whose step is later than the step of a newer checkpoint.

This happens if a run is resumed from a checkpoint of an earlier step."""

Forms = Mapping[str, Any]
"""Regular expression for names of JSON files -> type that the content of these files must have."""

ANY_FORM: Forms = {}

ALONE = ProcessGroup()

logger = logging.getLogger(__name__)


class _Manifest(BaseModel):
    files: dict[str, dict[str, Any]]


def write_nothing(folder: Path) -> None:
    """Write no policy."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The files of a checkpoint that one process writes; processes must not write the same file."""

    groups: Mapping[str, Tensors] = field(default_factory=dict)
    """File stem, which is a group's name or "<group>-<rank>" -> tensors by name."""

    documents: Mapping[str, str] = field(default_factory=dict)
    """Text of JSON files by file name."""

    write_policy: Callable[[Path], None] = write_nothing
    """Function that writes the policy into a folder."""


# --- Writing -------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    part: Part,
    *,
    peers: ProcessGroup = ALONE,
    disk: Disk | None = None,
    writer: str = "0",
    held: Callable[[], AbstractContextManager[None]] = nullcontext,
    keep: int | None = None,
) -> None:
    """Write a checkpoint completely or not at all; a killed process leaves earlier ones intact.

    Args:
        folder: `output_dir/checkpoint-<step>`; a checkpoint of the same step is replaced.
        part: the files that this process writes.
        peers: the processes of the run; all processes must call this function.
        disk: the processes that share the folder, by default all. With several disks, each disk
            gets the files of its own processes, and the manifest of all files.
        writer: id in the name of the unfinished folder, different for each run.
        held: returns a context in which the checkpoint is renamed and old checkpoints are removed,
            and in which no other process can take over the folder.
        keep: number of newest checkpoints to keep; None keeps all.

    Raises:
        TrainingError: the folder's name has no step, two files have the same name, the disk is
            full or cannot be written, or `held` finds that another process has taken over the
            folder. Raised in all processes.
    """
    step, disk = _step(folder), disk or Disk(ranks=tuple(range(peers.number)))
    is_leader = peers.rank == disk.leader
    partial = folder.with_name(f".{folder.name}.partial-{writer}")
    try:
        written = peers.together(lambda: _write_part(partial / f"part-{peers.rank}", part))
        peers.together(
            lambda: _finish(partial, folder, written, disk, held, keep) if is_leader else None
        )
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"The checkpoint of step {step} could not be written to '{folder}': {error}. Earlier "
            "checkpoints are unchanged. Free some space or lower save_total_limit, and resume "
            "from the latest checkpoint."
        ) from error
    finally:
        if is_leader:
            shutil.rmtree(partial, ignore_errors=True)


def _write_part(folder: Path, part: Part) -> dict[str, dict[str, int | str]]:
    """Write a process's files to the disk; return their digests by path in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    part.write_policy(folder)
    for name, tensors in part.groups.items():
        save_file(dict(_separate(tensors)), _unused(folder / f"{name}.safetensors"))
    for name, text in part.documents.items():
        _unused(folder / name).write_text(text)
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync_to_disk(path)
        files[path.relative_to(folder).as_posix()] = _digest(path)
    return files


def _unused(path: Path) -> Path:
    if path.exists():
        raise TrainingError(
            f"Two files of a checkpoint have the name '{path.name}', so one would overwrite the "
            "other. Give one group of tensors another name."
        )
    return path


def _separate(named: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yield contiguous tensors on the CPU; clone tied tensors, because safetensors refuses them."""
    seen = set()
    for name, tensor in named.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        yield name, plain.clone() if storage in seen else plain
        seen.add(storage)


def _finish(
    partial: Path,
    folder: Path,
    written: list[dict[str, dict[str, int | str]]],
    disk: Disk,
    held: Callable[[], AbstractContextManager[None]],
    keep: int | None,
) -> None:
    """Merge the processes' folders, write the manifest, and rename the merged folder."""
    for rank in disk.ranks:
        part = partial / f"part-{rank}"
        for path in list(part.iterdir()):
            path.rename(_unused(partial / path.name))
        part.rmdir()
    files = {name: digest for part in written for name, digest in part.items()}
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1))
    for path in (manifest, *(path for path in partial.rglob("*") if path.is_dir()), partial):
        sync_to_disk(path)
    with held():
        _move_into_place(partial, folder)
        _rename_superseded(folder)
        _remove_old(folder, keep)


def _move_into_place(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`, and replace an earlier checkpoint of the same step.

    The earlier checkpoint is first renamed to `.old`, and removed at the end.
    """
    aside = folder.with_name(f"{folder.name}.old")
    if (folder / MANIFEST).is_file():
        _remove(aside)
        folder.rename(aside)
    else:
        _remove(folder)
    partial.rename(folder)
    sync_to_disk(folder.parent)
    _remove(aside)


def _rename_superseded(newest: Path) -> None:
    """Rename checkpoints of later steps, so that no run resumes from them."""
    for step, path in finished_checkpoints(newest.parent).items():
        if step > _step(newest):
            aside = path.with_name(f"checkpoint-{step}{SUPERSEDED}")
            _remove(aside)
            path.rename(aside)


def _remove_old(newest: Path, keep: int | None) -> None:
    """Remove all but the `keep` newest checkpoints, and the unfinished folders of killed runs.

    Keep folders that are named like a checkpoint but have no manifest.
    """
    found = finished_checkpoints(newest.parent)
    replaced = [
        path
        for path in newest.parent.glob("checkpoint-*.old")
        if FOLDER_NAME.fullmatch(path.name) and path not in found.values()
    ]
    for leftover in replaced:
        _remove(leftover)
    for unfinished in newest.parent.glob(".checkpoint-*.partial*"):
        # A run that lost its lease may still write into the folder, so ignore errors.
        shutil.rmtree(unfinished, ignore_errors=True)
    excess = 0 if keep is None else max(0, len(found) - keep)
    for step in sorted(found)[:excess]:
        _remove(found[step])


def _step(folder: Path) -> int:
    match = FOLDER_NAME.fullmatch(folder.name)
    if match is None or match[2]:
        raise TrainingError(
            f"'{folder}' is not a valid name of a checkpoint, so a resumed run would not find the "
            "folder. Name the folder checkpoint-<step>."
        )
    return int(match[1])


# --- Reading -------------------------------------------------------------------


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
    """Verify every file of a checkpoint against its manifest; each process verifies some files.

    A JSON file must also have the form in `forms`, because somebody may have changed both the file
    and the manifest.

    Raises:
        TrainingError: the checkpoint is unfinished, a file is missing, truncated or changed, or a
            JSON file has another form. Raised in all processes.
    """
    share = slice(peers.rank, None, peers.number)
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
    # Share names instead of paths, because the paths on several disks may differ.
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
    if (actual := _digest(path)) != expected:
        return (
            f"'{path}' has changed since it was written: {actual}, but {MANIFEST} lists {expected}"
        )
    return None


def _find_other_form(path: Path, forms: Forms) -> str | None:
    """Describe how the form of a JSON file differs; None if it does not differ."""
    for pattern, form in forms.items():
        if re.fullmatch(pattern, path.name):
            try:
                read_record(parse_json(path.read_bytes()), form)
            except ValueError as error:
                return f"'{path}' is damaged: {error}"
    return None


def _digest(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _remove(folder: Path) -> None:
    """Rename and remove a folder, so that a partly removed folder is never read as a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.partial-removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
