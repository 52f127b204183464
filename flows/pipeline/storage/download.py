"""Fetch a file or a folder from S3, verified, into a cache on this disk."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from botocore.exceptions import ClientError
from botocore.response import StreamingBody

from pipeline.storage.addresses import S3Address
from pipeline.storage.local_cache import LocalCache
from pipeline.storage.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    Manifest,
    block_size,
    count_blocks,
    digest_of_block,
    safe_name,
    stored_file,
    write_block,
)
from pipeline.storage.multipart import BLOCKS
from pipeline.storage.objects import head_object, list_objects, read_object
from pipeline.storage.s3_client import (
    CONNECTIONS,
    TransferFaultError,
    is_missing,
    is_refused_write,
    repeated,
    s3_client,
)
from pipeline.storage.upload import BAR_SECONDS, key_of
from ppo_core.errors import DataError
from ppo_core.io.progress_bar import progress

WEIGHTS = (".bin", ".pt", ".safetensors")
"""Endings of the files with a model's weights."""

CHUNK_BYTES = 8 << 10
"""Bytes between two checks of the speed."""

GRACE_SECONDS, LEAST_BYTES_PER_SECOND = 30.0, 20_000
"""A request that takes longer than the grace and is slower than the speed is repeated."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """An object in S3 that becomes a file."""

    name: str
    """Path of the file within the folder."""

    address: S3Address
    size: int

    blocks: Sequence[str] | None
    """Digests of the blocks; None if another program stored the object."""

    version: str
    """ETag of the object; empty for an object whose blocks have digests."""


def fetch(address: S3Address, cache: LocalCache, *, weights: bool = True) -> Path:
    """Return a published file or folder, or other objects of S3, as verified files in the cache.

    Without `weights`, the files with the weights of a published model are left out.

    What an interrupted fetch has left is verified, and only the missing blocks are transferred.

    Objects that `publish` did not write have no digests. They are checked by size and version, so
    they cannot change during the fetch.

    Raises:
        ConfigError: S3 refuses the access.
        DataError: nothing is stored there, or its content does not fit the address.
        StorageError: a file could not be transferred.
    """
    manifest = published_manifest(address)
    if manifest is not None:
        if not weights:
            files = {n: file for n, file in manifest.files.items() if not n.endswith(WEIGHTS)}
            manifest = dataclasses.replace(manifest, files=files)
        sources = _published(address, manifest)
        identity, single = manifest.digest, manifest.is_file
    else:
        sources, single = _found(address)
        listed = [[one.name, one.size, one.version] for one in sources]
        identity = hashlib.sha256(json.dumps([str(address), listed]).encode()).hexdigest()
    with cache.filling(identity) as folder:
        _fill(folder, sources, address)
    complete = cache.path(identity)
    return complete / sources[0].name if single else complete


def fetch_into(folder: Path, address: S3Address, names: Collection[str]) -> None:
    """Fetch some files of a published folder into a folder, verified.

    Raises:
        DataError: a file differs from its entry in the manifest.
        StorageError: a file could not be transferred.
    """
    manifest = published_manifest(address) or Manifest(files={})
    files = {name: file for name, file in manifest.files.items() if name in names}
    _fill(folder, _published(address, Manifest(files=files)), address)


def published_manifest(address: S3Address) -> Manifest | None:
    """Return the manifest of a published file or folder; None if nothing was published.

    Raises:
        DataError: the manifest is damaged, or does not fit the address.
        StorageError: S3 does not answer.
    """
    found = published_version(address)
    return None if found is None else found[0]


def published_version(address: S3Address) -> tuple[Manifest, str] | None:
    """Return the manifest of a published file or folder, and its version in S3; None if none is.

    Raises:
        DataError: see `published_manifest`, as for the other error.
    """
    content = read_object(address.below(MANIFEST))
    if content is None:
        if address.digest:
            raise DataError(
                f"'{address}' is not published any more. The run cannot continue without it: "
                "restore it, or start a new run."
            )
        return None
    try:
        manifest = Manifest.decoded(content[0])
    except ValueError as error:
        if not address.digest:
            return None  # the folder has a file of the same name
        raise DataError(f"'{address.below(MANIFEST)}' is damaged: {error}.") from error
    if address.digest not in ("", manifest.digest):
        raise DataError(
            f"'{address}' was changed after it was published: its digest is {manifest.digest}. "
            "The run would continue with other files. Find out who writes there, and start again."
        )
    return manifest, content[1]


def read_file(address: S3Address, name: str) -> bytes:
    """Return the content of a small file of a published folder.

    Raises:
        DataError: the folder has no such file, or another content; or see `published_manifest`.
    """
    manifest = published_manifest(address)
    file = None if manifest is None else manifest.files.get(name)
    content = None if file is None else read_object(address.below(f"{file.digest[:16]}/{name}"))
    if file is None or content is None or file != stored_file(content[0]):
        raise DataError(f"'{address}' has no file {name!r} with the content of its manifest.")
    return content[0]


def _published(address: S3Address, manifest: Manifest) -> list[_Source]:
    return [
        _Source(
            name=name,
            address=S3Address(bucket=address.bucket, key=key_of(address, name, file)),
            size=file.size,
            blocks=file.blocks,
            version="",
        )
        for name, file in manifest.files.items()
    ]


def _found(address: S3Address) -> tuple[list[_Source], bool]:
    """Return the objects of a folder, or the object with this key, and whether it is one object."""
    whole = head_object(address) if address.key else None
    if whole is not None:
        name = address.key.rpartition("/")[2]
        return [_foreign(address, name, whole["ContentLength"], whole["ETag"])], True
    sources = []
    for each in list_objects(address):
        name = each["Key"].removeprefix(f"{address.key}/")
        # Some programs store an empty object for a folder itself.
        if name and not name.endswith("/"):
            place = S3Address(bucket=address.bucket, key=each["Key"])
            sources.append(_foreign(place, name, each["Size"], each["ETag"]))
    if not sources:
        raise DataError(f"There is nothing at '{address}'. Correct the address.")
    return sources, False


def _foreign(address: S3Address, name: str, size: int, version: str) -> _Source:
    try:
        name = safe_name(name)
    except ValueError as error:
        raise DataError(f"'{address}' cannot become a file: {error}. Rename the object.") from error
    return _Source(name=name, address=address, size=size, blocks=None, version=version)


def _fill(folder: Path, sources: Sequence[_Source], address: S3Address) -> None:
    """Complete the files of the sources in the folder; transfer only blocks that differ."""
    arrived = _Arrived(folder)
    for one in sources:
        path = folder / one.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    tasks = [
        (one, range(first, min(first + BLOCKS, count_blocks(one.size))))
        for one in sources
        for first in range(0, count_blocks(one.size), BLOCKS)
    ]
    total = sum(one.size for one in sources)
    with (
        progress(total, f"fetch {address.key}", "B", delay=BAR_SECONDS) as bar,
        ThreadPoolExecutor(CONNECTIONS) as pool,
    ):

        def complete(task: tuple[_Source, range]) -> None:
            one, blocks = task
            path = folder / one.name
            missing = [
                number
                for number in blocks
                if digest_of_block(path, number) != arrived.expected(one, number)
            ]
            if missing:
                repeated(one.address, lambda: _transfer(one, missing, path, arrived))
            bar.update(sum(block_size(one.size, number) for number in blocks))

        futures = [pool.submit(complete, task) for task in tasks]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            # Once a part has failed, those that wait are of no use.
            pool.shutdown(cancel_futures=True)


def _transfer(one: _Source, missing: list[int], path: Path, arrived: "_Arrived") -> None:
    """Transfer the missing blocks of an object into its file; take each written one off the list.

    Raises:
        TransferFaultError: the bytes do not fit the digest, are too few, or too slow.
        DataError: the object was replaced or removed.
    """
    while missing:
        first = last = missing[0]
        while last + 1 in missing:
            last += 1
        with closing(_request(one, first, last)) as body:
            read = _timed_reader(body)
            for number in range(first, last + 1):
                content = read(block_size(one.size, number))
                digest = hashlib.sha256(content).hexdigest()
                if one.blocks is not None and digest != one.blocks[number]:
                    raise TransferFaultError(f"block {number} has other bytes than its digest")
                write_block(path, number, content)
                arrived.add(one, number, digest)
                missing.remove(number)


def _request(one: _Source, first: int, last: int) -> StreamingBody:
    start = first * BLOCK_BYTES
    end = last * BLOCK_BYTES + block_size(one.size, last)
    condition = {"IfMatch": one.version} if one.version else {}
    try:
        reply = s3_client().get_object(
            Bucket=one.address.bucket,
            Key=one.address.key,
            Range=f"bytes={start}-{end - 1}",
            **condition,
        )
    except ClientError as error:
        if is_missing(error) or is_refused_write(error):
            raise DataError(
                f"'{one.address}' was removed or replaced while it was fetched, so the copy would "
                "mix two contents. Start again when nobody writes there."
            ) from error
        raise
    body: StreamingBody = reply["Body"]
    return body


def _timed_reader(body: StreamingBody) -> Callable[[int], bytes]:
    """Return a function that reads a number of bytes, and raises if they arrive too slowly."""
    started, arrived = time.monotonic(), 0

    def read(size: int) -> bytes:
        nonlocal arrived
        content = bytearray()
        while len(content) < size:
            chunk = body.read(min(CHUNK_BYTES, size - len(content)))
            content += chunk
            arrived += len(chunk)
            seconds = time.monotonic() - started
            if not chunk:
                raise TransferFaultError(f"{len(content)} of {size} bytes of a block arrived")
            if seconds > GRACE_SECONDS and arrived < seconds * LEAST_BYTES_PER_SECOND:
                raise TransferFaultError(f"only {arrived} bytes arrived in {seconds:.0f} seconds")
        return bytes(content)

    return read


class _Arrived:
    """Digests of the blocks of objects without a manifest, kept for a fetch that continues."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(f"{folder.name.removesuffix('.part')}.arrived")
        self._lock = Lock()
        self._digests: dict[tuple[str, int], str] = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        for line in lines:
            # The process may have been killed within the last line.
            with suppress(ValueError):
                name, number, digest = json.loads(line)
                self._digests[name, number] = digest

    def expected(self, one: _Source, number: int) -> str | None:
        """Return the digest that a block must have; None if it is not known yet."""
        return self._digests.get((one.name, number)) if one.blocks is None else one.blocks[number]

    def add(self, one: _Source, number: int, digest: str) -> None:
        """Note the digest of a block that is in its file."""
        if one.blocks is None:
            line = json.dumps([one.name, number, digest])
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
