"""Checkpoints: folders that hold everything the next update depends on, without pickle.

    output_dir/checkpoint-<step>/
        model.safetensors, config.json, ...   the policy, as transformers reads it
        <group>.safetensors                   critic, optimizer, generators, ...
        trainer_state.json                    the step, the groups' names, and the plain state
        manifest.json                         size and SHA-256 of all the others, written last

A folder without a manifest is no checkpoint.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_core.errors import TrainingError

JSON = Any
"""What json writes and reads back unchanged: no tuples, and no keys but strings."""

Tensors = Mapping[str, Tensor]

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
FOLDER_NAME = re.compile(r"checkpoint-(\d+)(\.old)?")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was read from a checkpoint, apart from the policy."""

    step: int
    """PPO updates that had been made."""

    tensors: dict[str, dict[str, Tensor]]
    """The groups, on the CPU."""

    state: dict[str, JSON]


# --- Writing and reading -------------------------------------------------------


def save_checkpoint(
    folder: Path,
    *,
    tensors: Mapping[str, Tensors],
    state: Mapping[str, JSON],
    write_policy: Callable[[Path], None],
) -> None:
    """Write a checkpoint as a whole or not at all; a killed process leaves the earlier ones.

    Args:
        folder: `output_dir/checkpoint-<step>`; one of the same step is replaced.
        tensors: groups of tensors, each a file of its own.
        state: all else.
        write_policy: writes the policy into the folder that it is given.

    Raises:
        TrainingError: the folder's name has no step, a group has the name of a policy's file, or
            the disk is full or cannot be written.
    """
    step = _step(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        partial.mkdir()
        write_policy(partial)
        for group, named in tensors.items():
            _write_group(partial / f"{group}.safetensors", named)
        record = {"step": step, "groups": list(tensors), "state": dict(state)}
        (partial / STATE).write_text(json.dumps(record))
        _write_manifest(partial)
        _move_into_place(partial, folder)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"The checkpoint of step {step} could not be written to '{folder}': {error}. Earlier "
            "checkpoints are as they were. Free some space, or lower save_total_limit, and resume "
            "from the latest."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify every file of a checkpoint, and read all but the policy.

    Raises:
        TrainingError: it is not finished, or a file is missing, truncated or changed.
    """
    _verify(folder)
    record = json.loads((folder / STATE).read_text())
    return Checkpoint(
        step=record["step"],
        tensors={group: load_file(folder / f"{group}.safetensors") for group in record["groups"]},
        state=record["state"],
    )


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The finished checkpoint of the highest step; None where there is none."""
    found = _finished(output_dir)
    return found[max(found)] if found else None


def remove_old_checkpoints(output_dir: str | Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed runs left half written.

    None keeps all checkpoints. Folders that are not finished checkpoints stay.
    """
    found = _finished(output_dir)
    for leftover in _leftovers(output_dir, found):
        _remove(leftover)
    excess = 0 if keep is None else max(0, len(found) - keep)
    for step in sorted(found)[:excess]:
        _remove(found[step])


def _step(folder: Path) -> int:
    match = FOLDER_NAME.fullmatch(folder.name)
    if match is None or match[2]:
        raise TrainingError(
            f"'{folder}' is no name for a checkpoint: it would not be found again. Call it "
            "checkpoint-<step>."
        )
    return int(match[1])


def _write_group(path: Path, named: Tensors) -> None:
    if path.exists():
        raise TrainingError(
            f"The policy's own files have a '{path.name}', which a group of tensors would "
            "overwrite. Give the group another name."
        )
    save_file(dict(_separate(named)), path)


def _separate(named: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Plain tensors on the CPU; tied ones are written twice, which safetensors does not do."""
    seen = set()
    for name, tensor in named.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        yield name, plain.clone() if storage in seen else plain
        seen.add(storage)


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _flush(path)
        files[path.relative_to(folder).as_posix()] = _fingerprint(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1))
    for path in (manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        _flush(path)


def _move_into_place(partial: Path, folder: Path) -> None:
    """Rename; an earlier one stays readable under another name until the new one is there."""
    aside = folder.with_name(f"{folder.name}.old")
    if (folder / MANIFEST).is_file():
        _remove(aside)
        folder.rename(aside)
    else:
        _remove(folder)
    partial.rename(folder)
    _flush(folder.parent)
    _remove(aside)


def _finished(output_dir: str | Path) -> dict[int, Path]:
    """Folders with a manifest, by step."""
    found: dict[int, Path] = {}
    # Sorted, so that checkpoint-5 comes before checkpoint-5.old, which stands in only for it.
    for path in sorted(Path(output_dir).glob("checkpoint-*")):
        match = FOLDER_NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.setdefault(int(match[1]), path)
    return found


def _leftovers(output_dir: str | Path, found: Mapping[int, Path]) -> list[Path]:
    """Half-written folders, and replaced ones that stand in for nothing."""
    replaced = [
        path
        for path in Path(output_dir).glob("checkpoint-*.old")
        if FOLDER_NAME.fullmatch(path.name) and path not in found.values()
    ]
    return [*replaced, *Path(output_dir).glob(".checkpoint-*.partial")]


def _verify(folder: Path) -> None:
    advice = (
        "Resume from an earlier checkpoint, or restore this one from a copy; going on from it "
        "would not be the same run."
    )
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise TrainingError(
            f"'{folder}' has no {MANIFEST}: it is no checkpoint, or was never finished. {advice}"
        )
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError) as error:
        raise TrainingError(f"'{manifest}' is damaged: {error!r}. {advice}") from error
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise TrainingError(f"'{path}' is missing. {advice}")
        actual = _fingerprint(path)
        if actual != expected:
            raise TrainingError(
                f"'{path}' has changed since it was written: {actual} where {MANIFEST} says "
                f"{expected}. {advice}"
            )


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """Remove a folder; the manifest first, so that half of it is no checkpoint."""
    if folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
