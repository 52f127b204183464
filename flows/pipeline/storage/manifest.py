"""The manifest of a published file or folder: size and SHA-256 of each of its files."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field

from ppo_core.io.text_files import parse_json
from ppo_core.io.validation import Natural, read_record

MANIFEST = "manifest.json"
"""Name of the manifest, which is written last."""

BLOCK_BYTES = 2 << 20
"""Block size in bytes of files in manifests of version 0.1; the last block may be shorter."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and digest of a file."""

    size: int
    """Number of bytes."""

    digest: str
    """SHA-256 of the file in hexadecimal; if there are blocks, SHA-256 of the blocks' digests."""

    blocks: tuple[str, ...] | None = None
    """SHA-256 of each block, if a program of version 0.1 published the file."""

    def is_at(self, path: Path) -> bool:
        """Return whether the file at a path has this size and digest."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as content:
            return self.is_content(content)

    def is_content(self, content: BufferedIOBase) -> bool:
        """Return whether an open file has this size and digest."""
        return stored_file(content, in_blocks=self.blocks is not None) == self

    def fields(self) -> dict[str, Any]:
        """Return the manifest's entry for this file; with blocks, in the format of version 0.1."""
        if self.blocks is not None:
            return {"size": self.size, "blocks": self.blocks}
        return {"bytes": self.size, "sha256": self.digest}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All files of a published folder, or one published file."""

    files: dict[str, StoredFile]
    """The files by path, with slashes, relative to the folder."""

    is_file: bool = False
    """Whether a single file was published, and not a folder."""

    def encoded(self) -> bytes:
        """Return the bytes of the manifest; equal content gives equal bytes."""
        files = {name: file.fields() for name, file in self.files.items()}
        return json.dumps({"files": files, "is_file": self.is_file}, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes of the manifest."""
        return hashlib.sha256(self.encoded()).hexdigest()

    @classmethod
    def decoded(cls, content: bytes) -> Self:
        """Parse the bytes of a manifest.

        Raises:
            ValueError: the bytes are not a manifest, or a file would be outside of the folder.
        """
        read = read_record(parse_json(content), _Manifest)
        files = {safe_name(name): _stored(name, file) for name, file in read.files.items()}
        if read.is_file and len(files) != 1:
            raise ValueError(f"one file was published, but there are {len(files)}")
        return cls(files=files, is_file=read.is_file)


_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _File(BaseModel):
    bytes: Natural
    sha256: _Sha256


class _FileInBlocks(BaseModel):
    size: Natural
    blocks: tuple[_Sha256, ...]


class _Manifest(BaseModel):
    files: dict[str, _File | _FileInBlocks]
    is_file: bool


def manifest_of(files: Mapping[str, Path], *, is_file: bool = False) -> Manifest:
    """Return the manifest of files by name; read the files in parallel.

    Raises:
        OSError: a file cannot be read.
    """

    def describe(path: Path) -> StoredFile:
        with path.open("rb") as content:
            return stored_file(content)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        stored = dict(zip(files, pool.map(describe, files.values()), strict=True))
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


def stored_file(content: BufferedIOBase, *, in_blocks: bool = False) -> StoredFile:
    """Return the description of an open file; with `in_blocks`, as version 0.1 wrote it."""
    if in_blocks:
        parts = iter(lambda: content.read(BLOCK_BYTES), b"")
        blocks = tuple(hashlib.sha256(part).hexdigest() for part in parts)
        return _in_blocks(content.tell(), blocks)
    digest = hashlib.file_digest(content, "sha256").hexdigest()
    return StoredFile(size=content.seek(0, os.SEEK_END), digest=digest)


def _in_blocks(size: int, blocks: tuple[str, ...]) -> StoredFile:
    digest = hashlib.sha256(bytes.fromhex("".join(blocks))).hexdigest()
    return StoredFile(size=size, digest=digest, blocks=blocks)


def _stored(name: str, file: _File | _FileInBlocks) -> StoredFile:
    if isinstance(file, _File):
        return StoredFile(size=file.bytes, digest=file.sha256)
    if len(file.blocks) != -(-file.size // BLOCK_BYTES):
        raise ValueError(f"{name!r} has {file.size} bytes in {len(file.blocks)} blocks")
    return _in_blocks(file.size, file.blocks)


def safe_name(name: str) -> str:
    """Return `name` if it is the relative path of a file in a folder.

    Raises:
        ValueError: the name is not a relative path, or leads out of the folder.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or {"..", "."} & set(path.parts) or "\0" in name:
        raise ValueError(f"{name!r} is not the path of a file within the folder")
    return name
