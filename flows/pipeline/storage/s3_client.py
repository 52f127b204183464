"""Calls of S3: one client, and the retry of calls that fail for a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import boto3
import tenacity
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError
from s3transfer.exceptions import RetriesExceededError
from urllib3.exceptions import HTTPError

from pipeline.storage.addresses import S3Address
from ppo_core.errors import ConfigError, StorageError, reason_of

Result = TypeVar("Result")

CONNECTIONS = 8
"""Number of parts that are transferred at a time."""

CONNECT_SECONDS, SILENCE_SECONDS = 10, 30
"""Maximum wait in seconds for a connection, and for further bytes of an open one."""

ATTEMPTS = 10
"""Number of times that a call is made before the transfer fails."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.25, 20.0
"""Limits of the random wait before an attempt: the first value for the second attempt, then twice
as much for each further attempt, up to the second value."""

TEMPORARY = {
    "ExpiredToken",
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "ThrottlingException",
}
"""Codes of errors after which the same call may succeed, as it may after every status above 499.
After ExpiredToken, botocore fetches new credentials."""

ADVICE = {
    "AccessDenied": "Give the role of this step access to the object",
    "403": "Give the role of this step access to the object",
    "ExpiredToken": "Renew the credentials",
    "InvalidAccessKeyId": "Correct the credentials",
    "NoSuchBucket": "Create the bucket, or name another one",
    "RequestTimeTooSkewed": "Set the clock of this machine",
    "SignatureDoesNotMatch": "Correct the credentials",
}
"""What to do after errors that need a person, by code."""


class TransferFaultError(ResponseStreamingError):  # type: ignore[misc]
    """The bytes of a transfer are wrong, incomplete or late; another attempt may give others.

    The transfer manager, too, repeats the transfer of a part after its base class.
    """

    fmt = "{error}"


@cache
def s3_client() -> Any:
    """Return the client of this process.

    Credentials, region and endpoint come from the standard chain: environment variables such as
    AWS_ENDPOINT_URL_S3, the shared configuration files, and the role of the machine.
    """
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=SILENCE_SECONDS,
        max_pool_connections=2 * CONNECTIONS,
        # Repeated by `repeated`, which also repeats calls whose body fails.
        retries={"mode": "standard", "total_max_attempts": 1},
        # `get_object` asks for each checksum. Otherwise the transfer manager would ask S3 about
        # each file before it downloads it.
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", config=config)


def repeated(address: S3Address, call: Callable[[], Result]) -> Result:
    """Return the result of a call; repeat it, after random waits, while its error is temporary.

    Raises:
        ConfigError: S3 refuses the call, so that another attempt would fail as well.
        StorageError: all attempts failed.
        ClientError: a precondition of the call is false, or the object does not exist.
    """
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_temporary),
        wait=tenacity.wait_random_exponential(
            multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS
        ),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        reraise=True,
    )
    with _explained(address):
        return attempts(call)


def is_missing(error: ClientError) -> bool:
    """Return whether an object does not exist."""
    return _code(error) in ("NoSuchKey", "404", "NotFound")


def is_refused_write(error: ClientError) -> bool:
    """Return whether IfNoneMatch or IfMatch kept a write from replacing another one."""
    return _code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")


def _is_temporary(error: BaseException) -> bool:
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return _code(error) in TEMPORARY or status >= 500
    # HTTPError: a connection that breaks within a reply that botocore reads as a whole.
    kinds = (
        ConnectionError,
        HTTPClientError,
        HTTPError,
        IncompleteReadError,
        ResponseParserError,
        TransferFaultError,
    )
    return isinstance(error, kinds)


@contextmanager
def _explained(address: S3Address) -> Iterator[None]:
    """Turn the error of a call into one that names the object and the next move."""
    try:
        yield
    except ClientError as error:
        if is_missing(error) or is_refused_write(error):
            raise
        if _is_temporary(error):
            raise _failed(address, error) from error
        advice = ADVICE.get(_code(error), "Correct what the message names")
        raise ConfigError(
            f"S3 refuses a request for '{address}': {reason_of(error)}. {advice}, and start again."
        ) from error
    except NoCredentialsError as error:
        raise ConfigError(
            f"There are no credentials for '{address}'. Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give this machine a role."
        ) from error
    except RetriesExceededError as error:
        raise _failed(address, error.last_exception) from error
    except (BotoCoreError, HTTPError) as error:
        raise _failed(address, error) from error


def _failed(address: S3Address, error: Exception) -> StorageError:
    return StorageError(
        f"'{address}' could not be transferred in {ATTEMPTS} attempts: {reason_of(error)}. The "
        "files that arrived are kept; start again to transfer the others."
    )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
