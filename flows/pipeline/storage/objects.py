"""Look up, read, write, list and remove single objects in S3."""

import base64
import hashlib
import re
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple

from botocore.exceptions import ClientError, FlexibleChecksumError

from pipeline.storage.addresses import S3Address
from pipeline.storage.s3_client import TransferFaultError, is_missing, repeated, s3_client

CHUNK_BYTES = 8 << 10
"""Bytes between two checks of the speed."""

GRACE_SECONDS, LEAST_BYTES_PER_SECOND = 30.0, 20_000
"""A transfer is restarted if it takes longer than the first value and is slower than the second."""


def read_object(address: S3Address) -> tuple[bytes, str] | None:
    """Return the bytes and the version (ETag) of a small object; None if it does not exist."""
    found = read_timed_object(address)
    return None if found.content is None else (found.content, found.version)


def get_object(**call: str) -> dict[str, Any]:
    """Make a call of GetObject; the body of the reply is a `TimedReply`."""
    reply: dict[str, Any] = s3_client().get_object(**call, ChecksumMode="ENABLED")
    return {**reply, "Body": TimedReply(reply)}


class TimedBody:
    """The body of a request; a read fails if the earlier bytes were sent too slowly."""

    def __init__(self, body: Any) -> None:
        """Take the body, an open file."""
        self._body, self._started, self._count = body, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the open file."""
        return getattr(self._body, name)

    def seek(self, *place: int) -> Any:
        """Set the position from which bytes are sent again, and restart the speed measurement."""
        self._count = 0
        return self._body.seek(*place)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes.

        Raises:
            TransferFaultError: the bytes are transferred too slowly.
        """
        if self._count == 0:
            self._started = time.monotonic()
        content: bytes = self._body.read(size)
        self._count += len(content)
        seconds = time.monotonic() - self._started
        if seconds > GRACE_SECONDS and self._count < seconds * LEAST_BYTES_PER_SECOND:
            raise TransferFaultError(
                error=f"the connection is too slow: {self._count} bytes in {seconds:.0f} seconds"
            )
        return content


class TimedReply(TimedBody):
    """The body of a reply; a read fails if the bytes are late, too few, or damaged."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        """Take the reply, which contains the range of the bytes or their number."""
        super().__init__(reply["Body"])
        found = re.match(r"bytes (\d+)-(\d+)/", reply.get("ContentRange", ""))
        self._size = int(found[2]) - int(found[1]) + 1 if found else reply["ContentLength"]

    def read(self, size: int = sys.maxsize) -> bytes:
        """Return the next `size` bytes; by default, all remaining bytes.

        Raises:
            TransferFaultError: the bytes are late, too few, or have a wrong checksum.
        """
        content = bytearray()
        while len(content) < size:
            try:
                chunk = super().read(min(CHUNK_BYTES, size - len(content)))
            except FlexibleChecksumError as error:
                raise TransferFaultError(error=error) from error
            if not chunk and self._count != self._size:
                raise TransferFaultError(error=f"{self._count} of {self._size} bytes arrived")
            if not chunk:
                break
            content += chunk
        return bytes(content)


class TimedObject(NamedTuple):
    """An object with times by the clock of S3, which all machines share."""

    content: bytes | None
    """None if there is no object."""

    version: str

    written: datetime
    """Time at which the object was written."""

    now: datetime
    """Time of the reply."""


def read_timed_object(address: S3Address) -> TimedObject:
    """Return a small object with times by the clock of S3; `content` is None if it is missing."""

    def read() -> TimedObject:
        reply = get_object(Bucket=address.bucket, Key=address.key)
        content = reply["Body"].read()
        return TimedObject(content, reply["ETag"], reply["LastModified"], _time_of(reply))

    try:
        return repeated(address, read)
    except ClientError as error:
        if is_missing(error):
            now = _time_of(error.response)
            return TimedObject(None, "", now, now)
        raise


def _time_of(reply: Mapping[str, Any]) -> datetime:
    """Return the time at which S3 sent a reply; if the reply has no date, this machine's time."""
    date = reply["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(date).astimezone(UTC) if date else datetime.now(UTC)


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
    """Return the properties of an object, such as ContentLength and ETag; None if it is missing."""
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
    """Remove objects of a bucket by key; ignore keys that do not exist."""
    for key in keys:
        repeated(folder, partial(s3_client().delete_object, Bucket=folder.bucket, Key=key))


def checksum_of(content: bytes) -> str:
    """Return the SHA-256 of bytes in base64, the format of S3."""
    return base64.b64encode(hashlib.sha256(content).digest()).decode()
