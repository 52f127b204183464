"""Single objects in S3: look at, read, write, list and remove them."""

import base64
import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from pipeline.storage.addresses import S3Address
from pipeline.storage.s3_client import is_missing, repeated, s3_client


def read_object(address: S3Address) -> tuple[bytes, str] | None:
    """Return the bytes and the version of a small object; None if there is none."""

    def read() -> tuple[bytes, str]:
        reply = s3_client().get_object(Bucket=address.bucket, Key=address.key)
        return reply["Body"].read(), reply["ETag"]

    try:
        return repeated(address, read)
    except ClientError as error:
        if is_missing(error):
            return None
        raise


def write_object(address: S3Address, content: bytes, **condition: str) -> str:
    """Write a small object, and return its version.

    Raises:
        ClientError: the condition, IfNoneMatch or IfMatch, is not met.
    """
    call = {
        "Bucket": address.bucket,
        "Key": address.key,
        "Body": content,
        "ChecksumSHA256": checksum_of(content),
    }
    version: str = repeated(address, lambda: s3_client().put_object(**call, **condition))["ETag"]
    return version


def head_object(address: S3Address) -> dict[str, Any] | None:
    """Return what S3 says of an object, as ContentLength and ETag; None if there is none."""
    try:
        reply: dict[str, Any] = repeated(
            address, lambda: s3_client().head_object(Bucket=address.bucket, Key=address.key)
        )
    except ClientError as error:
        if is_missing(error):
            return None
        raise
    return reply


def list_objects(address: S3Address) -> list[dict[str, Any]]:
    """Return the objects of a folder as S3 lists them: Key, Size and ETag."""
    prefix = f"{address.key}/".lstrip("/")
    pages = s3_client().get_paginator("list_objects_v2").paginate
    found: list[dict[str, Any]] = repeated(
        address,
        lambda: list(pages(Bucket=address.bucket, Prefix=prefix).search("Contents[] || `[]`")),
    )
    return found


def remove_objects(folder: S3Address, keys: Iterable[str]) -> None:
    """Remove objects of a bucket, those that exist."""
    for key in keys:
        repeated(folder, partial(s3_client().delete_object, Bucket=folder.bucket, Key=key))


def checksum_of(content: bytes) -> str:
    """Return the SHA-256 of bytes as S3 writes it."""
    return base64.b64encode(hashlib.sha256(content).digest()).decode()
