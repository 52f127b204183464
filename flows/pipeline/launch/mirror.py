"""Copy the checkpoints of a training to S3, from where another machine continues it."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.storage.workspace import Workspace
from ppo_core.checkpointing.folders import newest_checkpoint
from ppo_core.errors import PPOError
from ppo_core.reporting.metrics_file import METRICS_FILE, SELF_CHECK_FILE
from ppo_core.supervised.supervised_config import RATE_FILE

LOOK_SECONDS = 1.0
"""Seconds between two looks for a new checkpoint."""

BESIDE_CHECKPOINT = (METRICS_FILE, SELF_CHECK_FILE, RATE_FILE)
"""Files of a training that a resume needs beside its checkpoint."""


@contextmanager
def mirrored(workspace: Workspace, folder: Path) -> Iterator[None]:
    """Keep a copy of the newest checkpoint in S3 while the context lasts.

    On a machine whose folder is missing or empty, the copy becomes the folder first. A checkpoint
    is copied in the background after it is finished, and once more at the end of the context, so
    that nothing is lost if the training ends early. Without a store, nothing happens.

    Args:
        workspace: the workspace of the run.
        folder: folder of the training.

    Raises:
        StorageError: another machine continued the training meanwhile, or S3 does not answer.
    """
    if not workspace.store:
        yield
        return
    mirror = _Mirror(workspace, folder)
    mirror.start()
    try:
        yield
    finally:
        mirror.stop()


class _Mirror:
    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self._folder = folder
        self._shared = workspace.shared_folder(folder)
        self._copied: Path | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        self._shared.read()
        self._copied = newest_checkpoint(self._folder)
        if self._copied is not None:
            print(f"The training continues from {self._copied.name}.", flush=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._copy()

    def _run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                self._copy()
            # The training goes on: the next look tries again, and so does `stop`, which raises.
            except (PPOError, OSError) as error:
                print(f"The checkpoint was not copied: {error}", flush=True)

    def _copy(self) -> None:
        """Copy the newest checkpoint, unless it is copied already."""
        newest = newest_checkpoint(self._folder)
        if newest is None or newest == self._copied:
            return
        with TemporaryDirectory() as name:
            # The training appends to these files while they are copied.
            beside = {}
            for file in BESIDE_CHECKPOINT:
                if (self._folder / file).exists():
                    beside[file] = Path(shutil.copy(self._folder / file, name))
            checkpoint = {
                path.relative_to(self._folder).as_posix(): path
                for path in newest.rglob("*")
                if path.is_file()
            }
            self._shared.write(beside | checkpoint)
        self._copied = newest
