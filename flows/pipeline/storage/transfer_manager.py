"""boto3's transfer manager, with the same retries as all other requests to S3."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.exceptions import ClientError

from pipeline.storage.addresses import S3Address
from pipeline.storage.objects import TimedBody, get_object
from pipeline.storage.s3_client import (
    ATTEMPTS,
    CONNECTIONS,
    is_missing,
    is_refused_write,
    repeated,
    s3_client,
)
from ppo_core.errors import DataError

PART_BYTES = 16 << 20
"""Number of bytes that one request transfers. S3 accepts at most 10,000 parts, so the parts of
files above 160 GB are larger."""

CONFIG = TransferConfig(
    multipart_threshold=PART_BYTES,
    multipart_chunksize=PART_BYTES,
    max_concurrency=CONNECTIONS,
    # Limits the memory for pieces that wait for the disk.
    max_io_queue=2 * CONNECTIONS,
    # Attempts for a part with wrong or late bytes; `TransferClient` repeats failed calls.
    num_download_attempts=ATTEMPTS,
    # The CRT client would bypass `TransferClient`.
    preferred_transfer_client="classic",
)


class TransferClient:
    """The client of this process for the transfer manager.

    Unlike the plain client, it repeats calls after waits, names the object in errors, and detects
    slow connections and parts with too few bytes.
    """

    def __init__(self) -> None:
        """Use the event handlers of this process's client."""
        self.meta = s3_client().meta

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        """Return the function that makes the call `operation`, such as `upload_part`."""
        return partial(self.send, operation)

    def send(self, operation: str, **arguments: Any) -> Any:
        """Make a call, and return its reply."""

        def attempt() -> Any:
            body = arguments.get("Body")
            if body is None:
                return getattr(s3_client(), operation)(**arguments)
            body.seek(0)
            return getattr(s3_client(), operation)(**arguments | {"Body": TimedBody(body)})

        return repeated(address_of(arguments), attempt)

    def get_object(self, **call: Any) -> Any:
        """Return the reply with a part of an object.

        Raises:
            DataError: the object was replaced or removed.
        """
        address = address_of(call)
        try:
            return repeated(address, lambda: get_object(**call))
        except ClientError as error:
            if not (is_missing(error) or is_refused_write(error)):
                raise
            raise DataError(
                f"'{address}' was removed or replaced while it was fetched, so the copy would mix "
                "two contents. Start again when nobody writes there."
            ) from error


def transfer_manager(client: TransferClient) -> AbstractContextManager[Any]:
    """Return the transfer manager; an error within its context cancels all transfers."""
    manager: AbstractContextManager[Any] = create_transfer_manager(client, CONFIG)
    return manager


def address_of(arguments: dict[str, Any]) -> S3Address:
    """Return the address of the object that the arguments of a call name."""
    return S3Address(bucket=arguments["Bucket"], key=arguments["Key"])
