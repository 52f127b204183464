"""Write checkpoints completely or not at all; see `read_checkpoint` for their files."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ppo_core.checkpointing.disks import Disk
from ppo_core.checkpointing.folders import MANIFEST
from ppo_core.checkpointing.read_checkpoint import ALONE, Tensors, manifest_entry
from ppo_core.checkpointing.remove_old_checkpoints import (
    remove_folder,
    remove_old_checkpoints,
    rename_superseded,
    step_of,
)
from ppo_core.data.model_files import safetensors_as_os_errors
from ppo_core.distributed.exchange_objects import ProcessGroup
from ppo_core.errors import TrainingError
from ppo_core.io.atomic_files import sync_to_disk


def write_nothing(folder: Path) -> None:
    """Write no policy."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The files of a checkpoint that one process writes; processes must not write the same file."""

    groups: Mapping[str, Tensors] = field(default_factory=dict)
    """File stem (a group's name or "<group>-<rank>") -> tensors by name."""

    documents: Mapping[str, str] = field(default_factory=dict)
    """Text of JSON files by file name."""

    write_policy: Callable[[Path], None] = write_nothing
    """Function that writes the policy into a folder."""


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
    """Write a checkpoint completely or not at all; earlier checkpoints survive a killed process.

    Args:
        folder: `output_dir/checkpoint-<step>`; a checkpoint of the same step is replaced.
        part: the files that this process writes.
        peers: the processes of the run; all processes must call this function.
        disk: the processes whose `folder` is on the disk of this process; by default all. If there
            are several disks, each disk gets the files of its own processes, and the manifest of
            all files.
        writer: id in the name of the unfinished folder, different for each run.
        held: function that returns a context in which no other process can take over the folder.
            Inside the context, the checkpoint is renamed, and old checkpoints are removed.
        keep: number of newest checkpoints to keep; None keeps all.

    Raises:
        TrainingError: the folder's name has no step, two files have the same name, the disk is
            full or cannot be written, old checkpoints cannot be removed, or `held` finds that
            another process has taken over the folder. Raised in all processes.
    """
    step, disk = step_of(folder), disk or Disk(ranks=tuple(range(peers.number)))
    is_leader = peers.rank == disk.leader
    partial = folder.with_name(f".{folder.name}.partial-{writer}")
    try:
        written = peers.together(lambda: _write_part(partial / f"part-{peers.rank}", part))
        peers.together(
            lambda: _finish(partial, folder, written, disk, held, keep) if is_leader else None
        )
    except OSError as error:
        raise TrainingError(
            f"The checkpoint of step {step} could not be written to '{folder}': {error}. Earlier "
            "checkpoints are unchanged. Free some space or lower save_total_limit, and resume "
            "from the latest checkpoint."
        ) from error
    finally:
        if is_leader:
            shutil.rmtree(partial, ignore_errors=True)


@safetensors_as_os_errors()
def _write_part(folder: Path, part: Part) -> dict[str, dict[str, int | str]]:
    """Write a process's files to the disk; return their manifest entries by path in the folder."""
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
        files[path.relative_to(folder).as_posix()] = manifest_entry(path)
    return files


def _unused(path: Path) -> Path:
    if path.exists():
        raise TrainingError(
            f"Two files of a checkpoint have the name '{path.name}', so one would overwrite the "
            "other. This is a bug in ppo_core; please report it."
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
        replaced = _move_into_place(partial, folder)
        try:
            remove_folder(replaced)
            rename_superseded(folder)
            remove_old_checkpoints(folder, keep)
        except OSError as error:
            raise TrainingError(
                f"The checkpoint '{folder}' is complete, but other checkpoints could not be "
                f"renamed or removed: {error}. Mend what the error says in '{folder.parent}', and "
                "resume."
            ) from error


def _move_into_place(partial: Path, folder: Path) -> Path:
    """Rename `partial` to `folder`; return the new path of an earlier checkpoint of the same step.

    The earlier checkpoint is renamed to `.old`.
    """
    aside = folder.with_name(f"{folder.name}.old")
    if (folder / MANIFEST).is_file():
        remove_folder(aside)
        folder.rename(aside)
    else:
        remove_folder(folder)
    partial.rename(folder)
    sync_to_disk(folder.parent)
    return aside
