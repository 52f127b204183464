"""Progress bars of long phases, on a terminal or in a log."""

import sys
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0


class _OneLineEach:
    """A stream that writes each refresh of a bar as a new line, because logs cannot redraw."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()


def progress(
    total: int | None, description: str, unit: str, *, hidden: bool = False, delay: float = 0.0
) -> tqdm:
    """Return a progress bar: a context manager with the method `update(n)`.

    On a terminal the bar is redrawn in place. In a log (of a Metaflow task, for example), the bar
    is written as a line every few seconds. A total of None is not known. A phase that ends within
    `delay` seconds shows no bar.
    """
    if sys.stderr.isatty():
        return tqdm(total=total, desc=description, unit=unit, disable=hidden, delay=delay)
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        file=_OneLineEach(sys.stderr),
        mininterval=SECONDS_BETWEEN_LINES,
        ncols=100,
        ascii=True,
        disable=hidden,
        delay=delay,
    )
