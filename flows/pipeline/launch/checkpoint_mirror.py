"""Copy the checkpoints of a training to S3, so that other machines can continue the training."""

import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.launch.commands import ONE_MACHINE, Machines
from pipeline.storage.manifest import files_of
from pipeline.storage.shared_folder import written_at_end
from pipeline.storage.workspace import Workspace
from ppo_core.checkpointing.folders import (
    POLICIES,
    finished_checkpoints,
    newest_checkpoint,
    saved_policies,
)
from ppo_core.errors import PPOError
from ppo_core.reporting.metrics_file import COMPLETIONS, METRICS_FILE, SELF_CHECK_FILE
from ppo_core.supervised.supervised_config import RATE_FILE

LOOK_SECONDS = 1.0
"""Seconds between two checks for a new checkpoint."""

SECONDS_AFTER_FAILURE = 30.0
"""Seconds before the next attempt after a checkpoint could not be copied."""

SPENT_FILE = "language-model-calls.jsonl"
"""File with the calls and tokens of language models that are rewards, see `Budget`."""

BESIDE_CHECKPOINT = (METRICS_FILE, SELF_CHECK_FILE, RATE_FILE, SPENT_FILE)
"""Files of a training that a resume needs in addition to a checkpoint."""


@contextmanager
def mirrored(
    workspace: Workspace, folder: Path, here: Machines = ONE_MACHINE, *, training: str = ""
) -> Iterator[None]:
    """Keep a copy of the newest checkpoint, and of the policies saved before it, in S3.

    On one machine, a missing or empty folder is first filled from the copy. If another machine has
    continued the training since the last attempt on this machine, the folder is removed and then
    filled from the copy. During the context, finished checkpoints are copied in the background. So
    that the last finished checkpoint is not lost, the newest one is copied at the end of the
    context if it has not been copied yet. Without a store in S3, nothing is copied.

    With several machines, each machine copies the files of its own processes. A machine prefers a
    checkpoint that another machine has already copied. At the start, the folder is always replaced
    with the newest checkpoint that all machines have copied. In S3, each machine keeps its files of
    this common checkpoint and of the newest checkpoint that it copied itself.

    Args:
        workspace: the workspace of the run.
        folder: folder of the training on this machine.
        here: the machines of the training, with the index of this machine.
        training: digest of what decides the result, for a folder in which several trainings run one
            after another. Each of them has a copy of its own.

    Raises:
        StorageError: another machine continued the training meanwhile, or S3 does not answer.
    """
    if not workspace.store:
        yield
        return
    mirror = _Mirror(workspace, folder, here, training)
    mirror.start()
    with written_at_end(mirror.stop):
        yield


class _Mirror:
    """The copies of a training's checkpoints in S3; each machine has its own copy."""

    def __init__(self, workspace: Workspace, folder: Path, here: Machines, training: str) -> None:
        self._folder, self._here = folder, here
        self._copies = [
            workspace.shared_folder(folder, f"{training}/machine-{index}".removeprefix("/"))
            for index in range(here.count)
        ]
        self._own = self._copies[here.index]
        self._others = [copy for copy in self._copies if copy is not self._own]
        self._copied: Path | None = None
        self._over = threading.Event()
        # In the context of this thread, the stall watch sees the progress of the copies.
        run = partial(copy_context().run, self._run)
        self._thread = threading.Thread(target=run, name="mirror", daemon=True)

    def start(self) -> None:
        """Fetch the checkpoint to continue from, and start the thread that copies new ones."""
        if self._here.count == 1:
            if self._own.is_behind():
                # A later checkpoint that only this machine has would not fit the fetched metrics.
                print("Another machine has continued this training: its files are fetched.")
                if self._folder.exists():
                    shutil.rmtree(self._folder)
            self._own.read()
        else:
            self._read_common()
        newest = newest_checkpoint(self._folder)
        if newest is not None:
            print(f"The training continues from {newest.name}.", flush=True)
            # An earlier attempt on this disk may have ended before it had copied the checkpoint.
            if _of(newest.name, self._own.names):
                self._copied = newest
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and copy the newest checkpoint."""
        self._over.set()
        self._thread.join()
        self._copy(newest_checkpoint(self._folder))

    def _read_common(self) -> None:
        """Fetch all machines' files of the newest checkpoint that all machines have copied.

        First remove the folder of an earlier attempt, which lacks the files of other machines.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        names = [copy.look() for copy in self._copies]
        newest = _newest_common(names)
        if newest:
            # The first machine comes last, so that its metrics replace the others' older metrics.
            for copy, found in reversed([*zip(self._copies, names, strict=True)]):
                beside = {*BESIDE_CHECKPOINT, *_of(POLICIES, found), *_of(COMPLETIONS, found)}
                copy.read_files(_of(newest, found) | beside)

    def _run(self) -> None:
        wait = LOOK_SECONDS
        while not self._over.wait(wait):
            wait = LOOK_SECONDS
            try:
                self._copy(self._next())
            # Let the training continue. The next check tries again; `stop` also tries, and raises.
            except (PPOError, OSError) as error:
                print(f"Warning: The checkpoint was not copied: {error}", flush=True)
                wait = SECONDS_AFTER_FAILURE

    def _next(self) -> Path | None:
        """Return the checkpoint to copy.

        Prefer the newest checkpoint that another machine has copied and that is newer than this
        machine's last copy. If there is none, return the newest checkpoint in the folder.

        If each machine always copied its own newest checkpoint, a slow machine might skip those of
        the others, and no checkpoint would be complete.
        """
        newest = newest_checkpoint(self._folder)
        if self._here.count == 1 or newest == self._copied:
            return newest
        names = {name.split("/")[0] for copy in self._others for name in copy.look()}
        steps = finished_checkpoints(self._folder)
        copied = self._step_of(self._copied)
        shared = [step for step, path in steps.items() if step > copied and path.name in names]
        return steps[max(shared)] if shared else newest

    def _copy(self, checkpoint: Path | None) -> None:
        """Copy a checkpoint, unless it is the one that was copied last."""
        if checkpoint is None or checkpoint == self._copied:
            return
        with TemporaryDirectory() as name:
            # Copy these files to a local folder first, because the training appends to them.
            files = {
                file: Path(shutil.copy(self._folder / file, name))
                for file in BESIDE_CHECKPOINT
                if (self._folder / file).exists()
            }
            for path in (self._folder / COMPLETIONS).glob("step-*"):
                files[f"{COMPLETIONS}/{path.name}"] = path
            for file, path in files_of(checkpoint).items():
                files[f"{checkpoint.name}/{file}"] = path
            for policy in self._policies_before(checkpoint):
                for file, path in files_of(policy).items():
                    files[f"{POLICIES}/{policy.name}/{file}"] = path
            self._own.write(files, keep=self._still_needed())
        self._copied = checkpoint

    def _policies_before(self, checkpoint: Path) -> list[Path]:
        """Return the folders of the policies that the training saved up to a checkpoint.

        Later policies are left out, because the training may still be writing them.
        """
        policies, step = saved_policies(self._folder / POLICIES), self._step_of(checkpoint)
        return [path for update, path in policies.items() if update <= step]

    def _step_of(self, checkpoint: Path | None) -> int:
        """Return the step of a finished checkpoint; -1 if it is None or was removed."""
        steps = finished_checkpoints(self._folder)
        return next((step for step, path in steps.items() if path == checkpoint), -1)

    def _still_needed(self) -> set[str]:
        """Return the names of this machine's files in S3 that a restart may need.

        With several machines, these are the files of two checkpoints: the newest that all machines
        have copied, and the last that this machine has copied, because other machines may still be
        copying their files of it. With one machine, the result is empty.
        """
        if self._here.count == 1:
            return set()
        newest = _newest_common([self._own.names, *(copy.look() for copy in self._others)])
        needed = {newest} if newest else set()
        if self._copied is not None:
            needed.add(self._copied.name)
        return {name for name in self._own.names if name.split("/")[0] in needed}


def _newest_common(names: Sequence[Collection[str]]) -> str:
    """Return the newest checkpoint that is in all collections of names, or an empty string."""
    folders = set.intersection(*({name.split("/")[0] for name in each} for each in names))
    checkpoints = [name for name in folders if name.startswith("checkpoint-")]
    return max(checkpoints, key=lambda name: int(name.rpartition("-")[2]), default="")


def _of(folder: str, names: Collection[str]) -> set[str]:
    """Return those of `names` that are in `folder`, such as a checkpoint."""
    return {name for name in names if name.startswith(f"{folder}/")}
