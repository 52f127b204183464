"""Fetch a file or a folder from S3 into a cache on this disk, and verify it."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

from boto3.s3.transfer import ProgressCallbackInvoker

from pipeline.storage.addresses import S3Address
from pipeline.storage.local_cache import LocalCache
from pipeline.storage.manifest import MANIFEST, Manifest, StoredFile, safe_name, stored_file
from pipeline.storage.objects import head_object, list_objects, read_object
from pipeline.storage.s3_client import CONNECTIONS, TransferFaultError, repeated
from pipeline.storage.transfer_manager import TransferClient, transfer_manager
from pipeline.storage.upload import stored_at
from ppo_core.errors import DataError, StorageError
from ppo_core.io.progress_bar import BAR_DELAY, progress

WEIGHTS = (".bin", ".pt", ".safetensors")
"""File name extensions of a model's weights."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """An object in S3 that is fetched into a file."""

    name: str
    """Path of the file within the folder."""

    address: S3Address
    size: int

    file: StoredFile | None
    """Entry in the manifest; None if another program stored the object."""

    version: str
    """ETag of the object; empty if the digest is known."""


def fetch(address: S3Address, cache: LocalCache, *, weights: bool = True) -> Path:
    """Fetch a published file or folder, or other objects of S3; return the path in the cache.

    If `weights` is False, leave out the files with the weights of a published model.

    Files that an interrupted fetch has left are verified; only missing and damaged files are
    transferred.

    Objects that `publish` did not write have no digests. Their size and version are checked, so a
    change during the fetch is detected.

    Raises:
        ConfigError: S3 refuses the access.
        DataError: nothing is stored at the address, its manifest does not match the digest, or an
            object was replaced or removed.
        StorageError: a file could not be transferred, or its bytes do not match its digest.
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
    """Fetch some files of a published folder into a folder, and verify them.

    Raises:
        DataError: a published file was removed; or see `published_manifest`.
        StorageError: a file could not be transferred, or it differs from its entry in the manifest.
    """
    manifest = published_manifest(address) or Manifest(files={})
    files = {name: file for name, file in manifest.files.items() if name in names}
    _fill(folder, _published(address, Manifest(files=files)), address)


def published_manifest(address: S3Address) -> Manifest | None:
    """Return the manifest of a published file or folder; None if nothing was published.

    Raises:
        DataError: the address has a digest, and the manifest is missing, damaged or different.
        StorageError: S3 does not answer.
    """
    found = published_version(address)
    return None if found is None else found[0]


def published_version(address: S3Address) -> tuple[Manifest, str] | None:
    """Return a published manifest and its version in S3; None if nothing was published.

    Raises:
        DataError, StorageError: see `published_manifest`.
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
            return None  # a user's file that happens to have the name of a manifest
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
        DataError: the file is missing, or differs from the manifest; or see `published_manifest`.
    """
    manifest = published_manifest(address)
    file = None if manifest is None else manifest.files.get(name)
    content = None if file is None else read_object(stored_at(address, name, file))
    if file is None or content is None or not file.is_content(BytesIO(content[0])):
        raise DataError(f"'{address}' has no file {name!r} whose content matches the manifest.")
    return content[0]


def _published(address: S3Address, manifest: Manifest) -> list[_Source]:
    return [
        _Source(
            name=name,
            address=stored_at(address, name, file),
            size=file.size,
            file=file,
            version="",
        )
        for name, file in manifest.files.items()
    ]


def _found(address: S3Address) -> tuple[list[_Source], bool]:
    """Return the object at the address and True; for a folder, return its objects and False."""
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
    return _Source(name=name, address=address, size=size, file=None, version=version)


def _fill(folder: Path, sources: Sequence[_Source], address: S3Address) -> None:
    """Bring the files of the sources into the folder; transfer only missing or different files."""
    arrived = _Arrived(folder)
    unfinished = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    total = sum(one.size for one in sources)
    try:
        with (
            progress(total, f"fetch {address.key}", "B", delay=BAR_DELAY) as bar,
            ThreadPoolExecutor(CONNECTIONS) as pool,
            transfer_manager(TransferClient()) as manager,
        ):

            def complete(one: _Source, part: Path) -> None:
                path, expected = folder / one.name, arrived.expected(one)
                if expected is not None and expected.is_at(path):
                    bar.update(one.size)
                    return
                wrong: set[str] = set()
                file = repeated(one.address, lambda: _download(manager, one, part, bar, wrong))
                path.parent.mkdir(parents=True, exist_ok=True)
                part.replace(path)
                arrived.add(one, file)

            futures = [
                pool.submit(complete, one, unfinished / str(number))
                for number, one in enumerate(sources)
            ]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:
                # After the error of one file, cancel the waiting transfers.
                for future in futures:
                    future.cancel()
    finally:
        shutil.rmtree(unfinished)


def _download(manager: Any, one: _Source, part: Path, bar: Any, wrong: set[str]) -> StoredFile:
    """Transfer an object into a file, and return the description of the file.

    `wrong` contains the wrong digests of earlier attempts; a further wrong digest is added.

    Raises:
        TransferFaultError: the bytes do not match the digest, or are too few.
        StorageError: two attempts have returned the same wrong bytes.
        DataError: the object was replaced or removed.
    """
    if one.size:
        bucket, key, watch = one.address.bucket, one.address.key, _Watch(bar, one.version)
        manager.download(bucket, key, str(part), subscribers=[watch]).result()
    else:
        part.touch()
    in_blocks = one.file is not None and one.file.blocks is not None
    with part.open("rb") as content:
        found = stored_file(content, in_blocks=in_blocks)
    if found.size != one.size:
        raise TransferFaultError(error=f"{found.size} of {one.size} bytes arrived")
    if one.file in (None, found):
        return found
    if found.digest in wrong:
        raise StorageError(
            f"The bytes at '{one.address}' do not match its digest in the manifest, so the file "
            "cannot be used. Find out who writes there, remove the published folder, and start "
            "again."
        )
    wrong.add(found.digest)
    raise TransferFaultError(error="the bytes of the file do not match its digest")


class _Watch(ProgressCallbackInvoker):  # type: ignore[misc]
    """Shows the progress of a download, and fails if the object has another version."""

    def __init__(self, bar: Any, version: str) -> None:
        """Take the progress bar and the version; if `version` is empty, any version is accepted."""
        super().__init__(bar.update)
        self._version = version

    def on_queued(self, future: Any, **_: Any) -> None:
        """Require the version."""
        if self._version:
            future.meta.provide_object_etag(self._version)


class _Arrived:
    """Digests of fetched objects without a manifest, stored on disk for a resumed fetch."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(f"{folder.name.removesuffix('.part')}.arrived")
        self._lock = Lock()
        self._digests: dict[str, str] = {}
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        for line in lines:
            # The last line may be incomplete, and version 0.1 wrote lines in another format.
            with suppress(ValueError):
                name, digest = json.loads(line)
                self._digests[name] = digest

    def expected(self, one: _Source) -> StoredFile | None:
        """Return the description that a file must have; None if it is not known yet."""
        if one.file is None and one.name in self._digests:
            return StoredFile(size=one.size, digest=self._digests[one.name])
        return one.file

    def add(self, one: _Source, file: StoredFile) -> None:
        """Record the digest of a file that is complete."""
        if one.file is None:
            line = json.dumps([one.name, file.digest])
            with self._lock, self._path.open("a", encoding="utf-8") as opened:
                opened.write(line + "\n")
