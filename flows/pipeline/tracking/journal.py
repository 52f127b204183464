"""What is to be tracked, on disk first: MLflow may be away, or the process killed, at any time."""

import errno
import fcntl
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from pipeline.inputs.atomic_write import write_atomically

Entry = dict[str, Any]
"""One line: `kind` (metrics, tag, file, status), `run`, `time` in ms since 1970, and what it is."""


class Journal:
    """Entries in the order in which they came, and how far they were sent.

    Threads and processes may write to one folder at a time. In it are `journal.jsonl`, an entry a
    line, which is only appended to; `journal.sent`, how many bytes of it were sent;
    `journal.refused`, entries that MLflow would not take, with its reason; and `files`.

    An entry outlives its process, not a power cut: waiting for the disk would cost an update more
    than all the rest.
    """

    def __init__(self, folder: Path) -> None:
        """Go on with the journal in `folder`, or begin one."""
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
            # A power cut may have taken lines that were sent: those to come were not.
            self.mark_sent(min(self.sent(), self.end()))

    def log_metrics(self, run: str, values: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics of a run; what was measured earlier stands.

        A metric of a step is added once, ever: a training that is resumed from a checkpoint makes
        some of its steps again, to the same values, and their curves have one point a step. A
        metric without a step is a figure of the whole run: it is added again if it has changed.
        """
        with self._writing() as file:
            new = {
                name: float(value)
                for name, value in values.items()
                if self._is_new(run, step, name, float(value))
            }
            if new:
                self._append(file, kind="metrics", run=run, step=step, values=new)

    def set_tag(self, run: str, key: str, value: str) -> None:
        """Add a tag, unless it is the present one."""
        with self._writing() as file:
            if self._latest.get((run, "tag", key)) != value:
                self._append(file, kind="tag", run=run, key=key, value=value)

    def tag(self, run: str, key: str) -> str | None:
        """The value that a tag was last given here."""
        return self._latest.get((run, "tag", key))

    def set_status(self, run: str, status: str) -> None:
        """Add that a run is now RUNNING, FINISHED or FAILED."""
        with self._writing() as file:
            self._append(file, kind="status", run=run, status=status)

    def add_file(self, run: str, path: Path, folder: str = "") -> None:
        """Add a file or a folder, which has to stay where it is until it is sent.

        Args:
            run: the run that it is an artifact of.
            path: where it is.
            folder: folder among the artifacts that it is put into.
        """
        with self._writing() as file:
            self._append(file, kind="file", run=run, path=str(path.resolve()), folder=folder)

    def write_file(self, run: str, artifact: str, content: bytes) -> None:
        """Keep the content of an artifact beside the journal and add it; `artifact` is its path."""
        path = self.folder / "files" / run / artifact
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
        self.add_file(run, path, artifact.rpartition("/")[0])

    def next_step(self, run: str, prefix: str) -> int:
        """The step after the last one of all metrics of a run whose names begin with `prefix`."""
        with self._writing():
            steps = [
                step
                for (of, step), names in self._names.items()
                if of == run and any(name.startswith(prefix) for name in names)
            ]
        return max(steps, default=-1) + 1

    def end(self) -> int:
        """Where the journal ends, in bytes."""
        return self.path.stat().st_size

    def sent(self) -> int:
        """How many bytes of the journal were sent."""
        written = self._sent.read_text().strip() if self._sent.exists() else ""
        # A power cut may leave it empty: all is sent again, which MLflow stores once.
        return int(written) if written.isdigit() else 0

    def mark_sent(self, position: int) -> None:
        """Note that all entries before a position were sent."""
        write_atomically(self._sent, f"{position}\n".encode())

    def unsent(self, limit: int | None = None) -> list[tuple[Entry, int]]:
        """The next entries to send, each with the position to mark when it was."""
        with self.path.open("rb") as file:
            file.seek(self.sent())
            position = file.tell()
            entries = []
            for line in itertools.islice(file, limit):
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                entries.append((_entry(line), position))
        return entries

    def refuse(self, entry: Entry, reason: str) -> None:
        """Set aside an entry that can never be sent."""
        with self.refused.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "refused": reason}) + "\n")

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Whether nobody else sends this journal now; nobody will while the context lasts."""
        with (self.folder / "journal.sending").open("ab") as file:
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
        """The file, for this thread of this process alone, with all that others have added read."""
        with self._lock, self.path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                self._catch_up(file)
                yield file
            finally:
                # Closing would not do: a process that was forked meanwhile holds the file too.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _catch_up(self, file: FileIO) -> None:
        """Read what was added; half a line is that of a process that was killed, and goes."""
        file.seek(self._read_to)
        added = file.readall()
        whole = added.rfind(b"\n") + 1
        if whole < len(added):
            file.truncate(self._read_to + whole)
        for line in added[:whole].splitlines():
            self._remember(_entry(line))
        self._read_to += whole

    def _append(self, file: FileIO, **entry: Any) -> None:
        line = json.dumps({"time": time.time_ns() // 1_000_000, **entry}).encode() + b"\n"
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, "No room for a line of what is to be tracked", self.path)
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


def _entry(line: bytes) -> Entry:
    """The entry of a line; what a power cut or an editor has spoilt is one of its own kind."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    return entry if isinstance(entry, dict) else {"kind": "spoilt", "line": repr(line)}
