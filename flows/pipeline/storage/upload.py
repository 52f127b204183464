"""Publish a file or a folder in S3."""

import dataclasses
import hashlib
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from boto3.s3.transfer import ProgressCallbackInvoker
from botocore.exceptions import ClientError

from pipeline.storage.addresses import S3Address
from pipeline.storage.manifest import MANIFEST, Manifest, StoredFile, files_of, manifest_of
from pipeline.storage.objects import (
    head_object,
    list_objects,
    read_object,
    remove_objects,
    write_object,
)
from pipeline.storage.s3_client import is_refused_write
from pipeline.storage.transfer_manager import TransferClient, address_of, transfer_manager
from ppo_core.errors import ConfigError, StorageError
from ppo_core.io.progress_bar import BAR_DELAY, progress


def publish(source: Path, address: S3Address) -> S3Address:
    """Publish a file or a folder, unless the address is in use; return the pinned address.

    A pinned address contains the digest of the published manifest. Each file has the key
    ADDRESS/DIGEST/NAME. Therefore files of two writers never mix, and files that an interrupted
    transfer has stored are not transferred again. The manifest is written last.

    Raises:
        ConfigError: S3 refuses the access.
        StorageError: a file could not be transferred, or was changed during the transfer.
        OSError: a file cannot be read.
    """
    if (published := find(address)) is not None:
        return published
    files = files_of(source)
    return _publish(files, manifest_of(files, is_file=source.is_file()), address)


def publish_by_content(source: Path, address: S3Address) -> S3Address:
    """Publish a file or folder at ADDRESS-DIGEST, with the start of its manifest's digest."""
    files = files_of(source)
    manifest = manifest_of(files, is_file=source.is_file())
    named = dataclasses.replace(address, key=f"{address.key}-{manifest.digest[:16]}")
    return find(named) or _publish(files, manifest, named)


def replace(
    files: Mapping[str, Path],
    address: S3Address,
    version: str,
    *,
    kept: Mapping[str, StoredFile] | None = None,
) -> tuple[Manifest, str]:
    """Replace the published files of a folder; return the new manifest and its version.

    `remove_unneeded` then removes the objects of the replaced files.

    Args:
        files: the files by name.
        address: address of the folder.
        version: version of the manifest that this process read or wrote last; empty if nothing is
            published.
        kept: published files that stay.

    Raises:
        StorageError: another process has published after `version`; or see `publish`.
    """
    manifest = manifest_of(files)
    _upload(files, manifest, address)
    manifest = Manifest(files={**(kept or {}), **manifest.files})
    condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
    try:
        written = _write_manifest(manifest, address, **condition)
    except ClientError as error:
        current = read_object(address.below(MANIFEST))
        # If only the reply to the first attempt was lost, the manifest is written, and S3 refuses
        # the second attempt.
        if current is None or current[0] != manifest.encoded():
            raise _overtaken(address) from error
        written = current[1]
    return manifest, written


def remove_unneeded(manifest: Manifest, address: S3Address) -> None:
    """Remove the objects of a folder that no entry of its manifest names.

    If S3 does not answer, nothing is removed, and the next call removes the objects.
    """
    needed = {stored_at(address, name, file).key for name, file in manifest.files.items()}
    with suppress(StorageError, ConfigError):
        stored = {each["Key"] for each in list_objects(address)}
        remove_objects(address, stored - needed - {address.below(MANIFEST).key})


def find(address: S3Address) -> S3Address | None:
    """Return the pinned address of the content published at an address; None if there is none.

    Raises:
        ConfigError: S3 refuses the access.
        StorageError: S3 does not answer.
    """
    content = read_object(address.below(MANIFEST))
    if content is None:
        return None
    return address.pinned(hashlib.sha256(content[0]).hexdigest())


def _publish(files: Mapping[str, Path], manifest: Manifest, address: S3Address) -> S3Address:
    _upload(files, manifest, address)
    try:
        _write_manifest(manifest, address, IfNoneMatch="*")
    except ClientError as error:
        if not is_refused_write(error) or (published := find(address)) is None:
            raise
        return published
    return address.pinned(manifest.digest)


def _upload(files: Mapping[str, Path], manifest: Manifest, address: S3Address) -> None:
    """Upload the files that are not stored yet."""
    stored = {each["Key"]: each["Size"] for each in list_objects(address)}
    described = {
        stored_at(address, name, file).key: (files[name], file)
        for name, file in manifest.files.items()
    }
    # Small files first: errors are raised in this order, so the error of a small file comes soon.
    missing = sorted(
        (key for key, (_, file) in described.items() if stored.get(key) != file.size),
        key=lambda key: described[key][1].size,
    )
    total = sum(described[key][1].size for key in missing)
    with (
        progress(total, f"publish {address.key}", "B", delay=BAR_DELAY) as bar,
        transfer_manager(_UploadClient(described)) as manager,
    ):
        watch, checksum = ProgressCallbackInvoker(bar.update), {"ChecksumAlgorithm": "SHA256"}
        for future in [
            manager.upload(str(described[key][0]), address.bucket, key, checksum, [watch])
            for key in missing
        ]:
            future.result()


class _UploadClient(TransferClient):
    """Client for uploads; it creates an object only if the file still has its digest."""

    def __init__(self, described: Mapping[str, tuple[Path, StoredFile]]) -> None:
        """Take the path of each file and its entry in the manifest, by key."""
        super().__init__()
        self._described = described

    def put_object(self, **call: Any) -> Any:
        """Create the object of a small file; fail if the file was changed meanwhile."""
        digest = bytes.fromhex(self._check(call["Key"]).digest)
        # S3 compares the digest with the bytes that arrive.
        return self.send("put_object", **call, ChecksumSHA256=b64encode(digest).decode())

    def complete_multipart_upload(self, **call: Any) -> Any:
        """Create the object from the uploaded parts; fail if the file was changed meanwhile."""
        file = self._check(call["Key"])
        try:
            return self.send("complete_multipart_upload", **call)
        except ConfigError:
            # If only the reply to the first attempt was lost, the upload is complete, and the
            # second attempt finds no upload.
            written = head_object(address_of(call))
            if written is None or written["ContentLength"] != file.size:
                raise
            return written

    def _check(self, key: str) -> StoredFile:
        path, file = self._described[key]
        if not file.is_at(path):
            raise StorageError(
                f"'{path}' was changed while it was published, so the copy would be useless. "
                "Find out which program writes there, and start again."
            )
        return file


def _write_manifest(manifest: Manifest, address: S3Address, **condition: str) -> str:
    return write_object(address.below(MANIFEST), manifest.encoded(), **condition)


def _overtaken(address: S3Address) -> StorageError:
    return StorageError(
        f"Another process of this run has already published newer files at '{address}', so this "
        "process ends. The other process continues."
    )


def stored_at(address: S3Address, name: str, file: StoredFile) -> S3Address:
    """Return the address of a file of a published folder."""
    return address.below(f"{file.digest[:16]}/{name}")
