"""The manifest of a published file or folder: the digests of all blocks of its files."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from ppo_core.io.json_form import check_form, is_count, is_text, object_of
from ppo_core.io.text_files import parse_json

MANIFEST = "manifest.json"
"""Name of the manifest, which is written last."""

BLOCK_BYTES = 2 << 20
"""Bytes of each block of a file, except the last. A block is verified and kept on its own, so an
interrupted transfer loses little."""

DIGEST_CHARACTERS = 64

_FILE = {"size": is_count, "blocks": [is_text]}


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and digests of a file."""

    size: int
    """Number of bytes."""

    blocks: tuple[str, ...]
    """SHA-256 of each block, in hexadecimal; an empty file has none."""

    @property
    def digest(self) -> str:
        """SHA-256 of the digests of the blocks, which names the content."""
        return hashlib.sha256(bytes.fromhex("".join(self.blocks))).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All files of a published folder, or one published file."""

    files: dict[str, StoredFile]
    """The files by path, with slashes, relative to the folder."""

    is_file: bool = False
    """Whether a single file was published, and not a folder."""

    def encoded(self) -> bytes:
        """Return the bytes of the manifest; equal content gives equal bytes."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes of the manifest."""
        return hashlib.sha256(self.encoded()).hexdigest()

    @classmethod
    def decoded(cls, content: bytes) -> Self:
        """Return the manifest in the bytes of a file.

        Raises:
            ValueError: the bytes are no manifest, or a file would be outside of the folder.
        """
        fields = parse_json(content)
        check_form(fields, {"files": object_of(_is_stored_file), "is_file": _is_bool})
        files = {
            safe_name(name): StoredFile(size=file["size"], blocks=tuple(file["blocks"]))
            for name, file in fields["files"].items()
        }
        for name, file in files.items():
            if len(file.blocks) != count_blocks(file.size):
                raise ValueError(f"{name!r} has {file.size} bytes in {len(file.blocks)} blocks")
        if fields["is_file"] and len(files) != 1:
            raise ValueError(f"one file was published, but there are {len(files)}")
        return cls(files=files, is_file=fields["is_file"])


def manifest_of(files: Mapping[str, Path], *, is_file: bool = False) -> Manifest:
    """Return the manifest of files by name; all cores read them.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = {name: path.stat().st_size for name, path in files.items()}
    blocks = [(name, n) for name, size in sizes.items() for n in range(count_blocks(size))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(lambda block: digest_of_block(files[block[0]], block[1]), blocks)
        of_file: dict[str, list[str]] = {name: [] for name in files}
        for (name, _), digest in zip(blocks, digests, strict=True):
            of_file[name].append(digest)
    stored = {
        name: StoredFile(size=size, blocks=tuple(of_file[name])) for name, size in sizes.items()
    }
    return Manifest(files=stored, is_file=is_file)


def files_of(source: Path) -> dict[str, Path]:
    """Return the files of a folder by relative name, or the single file `source`."""
    if source.is_file():
        return {source.name: source}
    return {
        path.relative_to(source).as_posix(): path
        for path in sorted(source.rglob("*"))
        if path.is_file()
    }


def stored_file(content: bytes) -> StoredFile:
    """Return the description of a file with this content."""
    starts = range(0, len(content), BLOCK_BYTES)
    blocks = (hashlib.sha256(content[start : start + BLOCK_BYTES]).hexdigest() for start in starts)
    return StoredFile(size=len(content), blocks=tuple(blocks))


def count_blocks(size: int) -> int:
    """Return the number of blocks of a file with `size` bytes."""
    return -(-size // BLOCK_BYTES)


def block_size(size: int, number: int) -> int:
    """Return the number of bytes of a block of a file with `size` bytes."""
    return min(size - number * BLOCK_BYTES, BLOCK_BYTES)


def digest_of_block(path: Path, number: int) -> str:
    """Return the SHA-256 of a block of a file; of fewer bytes if the file ends earlier."""
    with path.open("rb") as file:
        file.seek(number * BLOCK_BYTES)
        return hashlib.sha256(file.read(BLOCK_BYTES)).hexdigest()


def write_block(path: Path, number: int, content: bytes) -> None:
    """Write the bytes of a block into an existing file."""
    with path.open("r+b") as file:
        file.seek(number * BLOCK_BYTES)
        file.write(content)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_stored_file(value: object) -> bool:
    check_form(value, _FILE)
    assert isinstance(value, dict)
    return all(
        len(block) == DIGEST_CHARACTERS and set(block) <= set("0123456789abcdef")
        for block in value["blocks"]
    )


def safe_name(name: str) -> str:
    """Return the relative path of a file in a folder.

    Raises:
        ValueError: the name is no such path, or leads out of the folder.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or {"..", "."} & set(path.parts) or "\0" in name:
        raise ValueError(f"{name!r} is not the path of a file within the folder")
    return name
