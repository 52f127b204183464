"""Open a data file, which may be compressed with gzip."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from ppo_core.io.text_files import open_regular_file

GZIP = ".gz"


def format_of(path: Path) -> str:
    """Return the suffix of a file's format: `.jsonl` for both rows.jsonl and rows.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix == GZIP else path.suffix


@contextmanager
def open_data_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a file that ends in .gz is decompressed.

    Raises:
        OSError: the file cannot be opened, or is a pipe, a device or a socket.
    """
    with open_regular_file(path) as file:
        if path.suffix != GZIP:
            yield file
            return
        with gzip.open(cast(IO[bytes], file)) as content:
            yield cast(BinaryIO, content)
