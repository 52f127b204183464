"""Upload a file of several parts, and continue an upload that was interrupted."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.storage.addresses import S3Address
from pipeline.storage.manifest import BLOCK_BYTES, StoredFile
from pipeline.storage.objects import checksum_of, head_object
from pipeline.storage.s3_client import CONNECTIONS, repeated, s3_client
from ppo_core.errors import ConfigError, StorageError

BLOCKS = 8
"""Maximum number of blocks that one request transfers."""

PART_BYTES = BLOCKS * BLOCK_BYTES
"""Maximum number of bytes that one request transfers; a file above it is uploaded in parts."""

LEAST_BLOCKS = 3
"""Minimum number of blocks of a part: S3 takes no part below 5 MiB, except the last."""

MOST_IN_FLIGHT = 0.1
"""Fraction of a file whose parts are transferred at a time, which a killed upload loses."""

LEAST_CONNECTIONS = 4
"""Number of parts that are transferred at a time even if they exceed MOST_IN_FLIGHT, as those of
files below 250 MB do; with fewer, most of the time would pass in waiting for replies."""

MOST_PARTS = 10_000
"""Number of parts that S3 allows in one file."""


def upload_parts(path: Path, file: StoredFile, target: S3Address, bar: Any) -> None:
    """Upload a file of several parts; continue an upload that was interrupted.

    Args:
        path: the file.
        file: its size and digests.
        target: address of the object.
        bar: progress bar, which advances by bytes.

    Raises:
        StorageError: the file is too large, or was changed; or see `repeated`.
    """
    blocks, at_once = parts_of(file.size)
    count = -(-len(file.blocks) // blocks)
    if count > MOST_PARTS:
        raise StorageError(
            f"'{path}' has {file.size} bytes, and S3 takes at most {MOST_PARTS * PART_BYTES} in "
            "this form. Store the model in several files."
        )
    client, where = s3_client(), {"Bucket": target.bucket, "Key": target.key}
    upload, stored = _interrupted_upload(target)
    if not upload:
        upload = repeated(
            target, lambda: client.create_multipart_upload(**where, ChecksumAlgorithm="SHA256")
        )["UploadId"]

    def put(number: int) -> dict[str, Any]:
        content, part = checked_part(path, number, file, blocks), {"PartNumber": number + 1}
        checksum = checksum_of(content)
        earlier = stored.get(number + 1)
        if earlier is not None and _is_part(earlier, content, checksum):
            tag = earlier["ETag"]
        else:
            tag = repeated(
                target,
                lambda: client.upload_part(
                    **where, **part, UploadId=upload, Body=content, ChecksumSHA256=checksum
                ),
            )["ETag"]
        bar.update(len(content))
        return {**part, "ETag": tag, "ChecksumSHA256": checksum}

    with ThreadPoolExecutor(at_once) as pool:
        parts = list(pool.map(put, range(count)))
    try:
        repeated(
            target,
            lambda: client.complete_multipart_upload(
                **where, UploadId=upload, MultipartUpload={"Parts": parts}
            ),
        )
    except ConfigError:
        # After a lost reply the upload is complete, and a second call finds no upload.
        written = head_object(target)
        if written is None or written["ContentLength"] != file.size:
            raise


def _interrupted_upload(target: S3Address) -> tuple[str, dict[int, Any]]:
    """Return the id of an upload that did not end, and its parts; an empty id if there is none."""
    client, where = s3_client(), {"Bucket": target.bucket}
    found = repeated(target, lambda: client.list_multipart_uploads(**where, Prefix=target.key)).get(
        "Uploads", []
    )
    uploads = [each["UploadId"] for each in found if each["Key"] == target.key]
    if not uploads:
        return "", {}
    pages = client.get_paginator("list_parts").paginate
    parts = repeated(
        target,
        lambda: list(
            pages(**where, Key=target.key, UploadId=uploads[-1]).search("Parts[] || `[]`")
        ),
    )
    return uploads[-1], {part["PartNumber"]: part for part in parts}


def _is_part(stored: Mapping[str, Any], content: bytes, checksum: str) -> bool:
    """Return whether a stored part has this content."""
    if "ChecksumSHA256" in stored:
        return bool(stored["ChecksumSHA256"] == checksum)
    # Some stores keep no checksum; the tag is the MD5 of a part that is not encrypted by KMS.
    tag = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return bool(stored["ETag"].strip('"') == tag)


def checked_part(path: Path, number: int, file: StoredFile, blocks: int = BLOCKS) -> bytes:
    """Return the bytes of a part of `blocks` blocks, which have the digests of the manifest.

    Raises:
        StorageError: the file was changed.
    """
    digests = file.blocks[number * blocks : (number + 1) * blocks]
    with path.open("rb") as opened:
        opened.seek(number * blocks * BLOCK_BYTES)
        content = [opened.read(BLOCK_BYTES) for _ in digests]
    if tuple(hashlib.sha256(block).hexdigest() for block in content) != digests:
        raise StorageError(
            f"'{path}' was changed while it was published, so the copy would be of no use. Find "
            "out which program writes there, and start again."
        )
    return b"".join(content)


def parts_of(size: int) -> tuple[int, int]:
    """Return the number of blocks of each part of a file, and of parts uploaded at a time.

    Parts of a large file are as large as a request may be. Those of a smaller one are smaller and
    fewer, so that a killed upload loses at most MOST_IN_FLIGHT of the file, if S3 permits it.
    """
    in_flight = int(MOST_IN_FLIGHT * size) // BLOCK_BYTES
    blocks = min(max(in_flight // CONNECTIONS, LEAST_BLOCKS), BLOCKS)
    return blocks, min(max(in_flight // blocks, LEAST_CONNECTIONS), CONNECTIONS)
