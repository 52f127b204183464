"""Progress of long phases: rate and time left, on a terminal and in a log."""

import sys
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0


class _OneLineEach:
    """A stream on which each refresh of a bar is a line: logs have no carriage return."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()


def progress(total: int, description: str, unit: str, *, hidden: bool = False) -> tqdm:
    """A progress bar to use as a context manager; call its `update(n)`.

    On a terminal it is redrawn in place; elsewhere (a Metaflow task, a log file) a line is
    written every few seconds.
    """
    if sys.stderr.isatty():
        return tqdm(total=total, desc=description, unit=unit, disable=hidden)
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        file=_OneLineEach(sys.stderr),
        mininterval=SECONDS_BETWEEN_LINES,
        ncols=100,
        ascii=True,
        disable=hidden,
    )
