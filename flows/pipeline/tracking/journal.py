"""Journal on disk of all entries for MLflow, because MLflow or the process may fail."""

import errno
import fcntl
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from ppo_core.io.atomic_files import explained_writes, write_atomically
from ppo_core.io.text_files import parse_strict_json

Entry = dict[str, Any]
"""A line of the journal: `kind` (metrics, tag, file, status), `run`, `time` in ms since 1970, and
the fields of the kind."""

SPOILT = "spoilt"
"""Kind of the entry of a damaged line."""

IMPORTING_MLFLOW = threading.Lock()
"""Lock for the import of MLflow, because two threads that import it at once may deadlock."""


class Journal:
    """Stores entries in order, and the position up to which they were sent.

    Several threads and processes may write to a folder at the same time. The folder contains
    `journal.jsonl`, which is append-only with one entry per line; `journal.sent`, the number of
    bytes sent; `journal.refused`, refused entries with the reasons; and `files`.

    An entry survives the end of the process, but may be lost in a power cut: the journal calls no
    fsync, which would dominate the time of an update.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the journal in `folder`."""
        with explained_writes(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.path = self.folder / "journal.jsonl"
        self.refused = self.folder / "journal.refused"
        self._sent = self.folder / "journal.sent"
        self._lock = threading.Lock()
        self._read_to = 0
        self._names: dict[tuple[str, int], set[str]] = {}
        self._latest: dict[tuple[str, str, str], str] = {}
        with self._writing():
            # If a power cut removed sent lines, the position is moved back to the end of the file.
            self.mark_sent(min(self.sent(), self.end()))

    def log_metrics(self, run: str, values: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics of a run, except metrics that the journal already has for this step.

        A training that resumes from a checkpoint repeats some steps with equal values, and the
        curve must keep one point per step. A metric without a step describes the full run and is
        added again if the value has changed.
        """
        with self._writing() as file:
            new = {
                name: float(value)
                for name, value in values.items()
                if self._is_new(run, step, name, float(value))
            }
            if new:
                self._append(file, kind="metrics", run=run, step=step, values=new)

    def remember_metric(self, run: str, step: int, name: str) -> None:
        """Make `log_metrics` skip a metric of a step, as if the journal contained the metric."""
        self._names.setdefault((run, step), set()).add(name)

    def set_tag(self, run: str, key: str, value: str) -> None:
        """Add a tag, unless the tag already has this value."""
        with self._writing() as file:
            if self._latest.get((run, "tag", key)) != value:
                self._append(file, kind="tag", run=run, key=key, value=value)

    def tag(self, run: str, key: str) -> str | None:
        """Return the last value of a tag; None if the journal has no such tag."""
        return self._latest.get((run, "tag", key))

    def set_status(self, run: str, status: str) -> None:
        """Add the status of a run: RUNNING, FINISHED, FAILED or KILLED."""
        with self._writing() as file:
            self._append(file, kind="status", run=run, status=status)

    def status(self, run: str) -> str | None:
        """Return the last status of a run; None if the journal has no status."""
        return self._latest.get((run, "status", ""))

    def add_file(self, run: str, path: Path, folder: str = "") -> None:
        """Add a file or a folder, which must exist until it is sent.

        Args:
            run: id of the MLflow run for the artifact.
            path: the file or folder.
            folder: target folder among the artifacts of the run.
        """
        place = path.resolve()
        # Store a relative path, because the next step may read the journal in another folder.
        if place.is_relative_to(self.folder):
            place = place.relative_to(self.folder)
        with self._writing() as file:
            self._append(file, kind="file", run=run, path=str(place), folder=folder)

    def write_file(self, run: str, artifact: str, content: bytes) -> None:
        """Store an artifact in `files` and add it; `artifact` is the path among the artifacts."""
        path = self.path_of(run, artifact)
        with explained_writes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content, durable=False)
        self.add_file(run, path, artifact.rpartition("/")[0])

    def path_of(self, run: str, artifact: str) -> Path:
        """Return the path of an artifact that `write_file` stores."""
        return self.folder / "files" / run / artifact

    def next_step(self, run: str, prefix: str) -> int:
        """Return the number after the last step at which a run has metrics with a prefix."""
        with self._writing():
            steps = [
                step
                for (of, step), names in self._names.items()
                if of == run and any(name.startswith(prefix) for name in names)
            ]
        return max(steps, default=-1) + 1

    def curves(self, run: str) -> dict[str, list[tuple[int, float]]]:
        """Return the metrics of a run that have steps: name -> (step, value), ordered by step."""
        found: dict[str, list[tuple[int, float]]] = {}
        with self.path.open("rb") as file:
            # Parse only lines with the id of the run, because most lines belong to other runs.
            for line in file:
                if run.encode() in line:
                    match _entry(line):
                        case {"kind": "metrics", "run": of, "step": int(step), "values": values}:
                            for name, value in values.items() if of == run else ():
                                found.setdefault(name, []).append((step, value))
        return {name: sorted(points) for name, points in found.items()}

    def end(self) -> int:
        """Return the size of the journal in bytes."""
        return self.path.stat().st_size

    def sent(self) -> int:
        """Return the number of bytes that were sent."""
        written = self._sent.read_bytes().strip() if self._sent.exists() else b""
        # A power cut may leave the file empty. Then all entries are sent again, but MLflow stores
        # each entry once.
        return int(written) if re.fullmatch(rb"[0-9]{1,18}", written) else 0

    def mark_sent(self, position: int) -> None:
        """Record that all entries before a position were sent."""
        with explained_writes(self._sent):
            write_atomically(self._sent, f"{position}\n", durable=False)

    def unsent(self, limit: int | None = None) -> list[tuple[Entry, int]]:
        """Return at most `limit` entries to send next, each with the position for `mark_sent`."""
        with self.path.open("rb") as file:
            file.seek(self.sent())
            position = file.tell()
            entries = []
            for line in itertools.islice(file, limit):
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                entries.append((self._with_full_path(_entry(line)), position))
        return entries

    def _with_full_path(self, entry: Entry) -> Entry:
        if entry["kind"] != "file":
            return entry
        return entry | {"path": str(self.folder / entry["path"])}

    def refuse(self, entry: Entry, reason: str) -> None:
        """Write to `journal.refused` an entry that MLflow will never accept."""
        with explained_writes(self.refused), self.refused.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "refused": reason}) + "\n")

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Lock the sending of this journal; yield whether this process has the lock.

        Raises:
            TrainingError: the lock file cannot be written.
        """
        path = self.folder / "journal.sending"
        with explained_writes(path):
            file = path.open("ab")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

    @contextmanager
    def _writing(self) -> Iterator[FileIO]:
        """Lock the journal for this thread, read entries of other processes, and yield the file.

        Raises:
            TrainingError: the journal cannot be written, for example because the disk is full.
        """
        with (
            explained_writes(self.path),
            self._lock,
            self.path.open("a+b", buffering=0) as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                self._catch_up(file)
                yield file
            finally:
                # Closing is not enough, because a process forked meanwhile also has the file open.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _catch_up(self, file: FileIO) -> None:
        """Read new entries; cut off the partial line that a killed process left."""
        file.seek(self._read_to)
        added = file.readall()
        complete = added.rfind(b"\n") + 1
        if complete < len(added):
            file.truncate(self._read_to + complete)
        for line in added[:complete].splitlines():
            self._remember(_entry(line))
        self._read_to += complete

    def _append(self, file: FileIO, **entry: Any) -> None:
        line = json.dumps({"time": time.time_ns() // 1_000_000, **entry}).encode() + b"\n"
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, "No space left for a line of the journal", self.path)
        self._read_to += len(line)
        self._remember(entry)

    def _is_new(self, run: str, step: int | None, name: str, value: float) -> bool:
        if step is None:
            return self._latest.get((run, "metric", name)) != repr(value)
        return name not in self._names.get((run, step), ())

    def _remember(self, entry: Entry) -> None:
        match entry:
            case {"kind": "metrics", "run": run, "step": None, "values": values}:
                for name, value in values.items():
                    self._latest[run, "metric", name] = repr(value)
            case {"kind": "metrics", "run": run, "step": step, "values": values}:
                self._names.setdefault((run, step), set()).update(values)
            case {"kind": "tag", "run": run, "key": key, "value": value}:
                self._latest[run, "tag", key] = value
            case {"kind": "status", "run": run, "status": status}:
                self._latest[run, "status", ""] = status


def _entry(line: bytes) -> Entry:
    """Return the entry of a line; a line damaged by a power cut gets the kind SPOILT."""
    try:
        entry = parse_strict_json(line.decode())
    except ValueError:
        entry = None
    return entry if _is_entry(entry) else {"kind": SPOILT, "line": repr(line)}


def _is_entry(value: Any) -> bool:
    """Return whether a value has the fields of its kind of entry."""
    match value:
        case {"run": str(), "time": int(), "kind": "metrics", "values": dict(values)}:
            return isinstance(value.get("step"), int | None) and all(
                isinstance(number, int | float) for number in values.values()
            )
        case {"run": str(), "time": int(), "kind": "tag", "key": str(), "value": str()}:
            return True
        case {"run": str(), "time": int(), "kind": "status", "status": str()}:
            return True
        case {"run": str(), "time": int(), "kind": "file", "path": str(), "folder": str()}:
            return True
    return False
