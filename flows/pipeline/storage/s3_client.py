"""The client for S3, and retries of calls that fail temporarily."""

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
    CredentialRetrievalError,
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
"""Number of parts that are transferred at the same time."""

CONNECT_SECONDS, SILENCE_SECONDS = 10, 30
"""Maximum wait in seconds for a connection, and for the next bytes of an open connection."""

ATTEMPTS = 10
"""Maximum number of attempts of a call."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.25, 20.0
"""Each attempt after the first waits a random number of seconds. The maximum of this wait is the
first value for the second attempt; it doubles with each attempt, up to the second value."""

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
"""Codes of errors after which the same call may succeed. Errors with a status of 500 or more are
also temporary. After ExpiredToken, botocore fetches new credentials."""

ADVICE = {
    "AccessDenied": "Give the role of this step access to the object",
    "403": "Give the role of this step access to the object",
    "InvalidAccessKeyId": "Correct the credentials",
    "NoSuchBucket": "Create the bucket, or name another one",
    "RequestTimeTooSkewed": "Set the clock of this machine",
    "SignatureDoesNotMatch": "Correct the credentials",
}
"""What the user must do after an error, by error code."""


class TransferFaultError(ResponseStreamingError):  # type: ignore[misc]
    """The bytes of a transfer are wrong, incomplete or late; another attempt may succeed.

    boto3's transfer manager repeats the transfer of a part after an error of the base class.
    """

    fmt = "{error}"


@cache
def s3_client() -> Any:
    """Return the client of this process.

    Credentials, region and endpoint come from the standard chain: environment variables such as
    AWS_ENDPOINT_URL_S3, the shared configuration files, and the role of the machine.

    Raises:
        ConfigError: the chain names an unknown profile, an address that is not a URL, and so on.
    """
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=SILENCE_SECONDS,
        max_pool_connections=2 * CONNECTIONS,
        # `repeated` retries calls instead, also if reading the body of a reply fails.
        retries={"mode": "standard", "total_max_attempts": 1},
        # `get_object` asks for each checksum. With "when_supported", the transfer manager would
        # send an additional request about each file before the download.
        response_checksum_validation="when_required",
    )
    try:
        return boto3.client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        if _is_temporary(error):
            raise
        raise ConfigError(
            f"The AWS configuration of this machine is invalid: {reason_of(error)}. Correct the "
            "environment variable or the file in ~/.aws, and start again."
        ) from error


def repeated(address: S3Address, call: Callable[[], Result]) -> Result:
    """Return the result of a call; after a temporary error, wait and repeat the call.

    Raises:
        ConfigError: S3 refuses the call; another attempt would also fail.
        StorageError: all attempts failed.
        ClientError: a precondition of the call is not met, or the object does not exist.
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
    """Return whether an error means that the object does not exist."""
    return _code(error) in ("NoSuchKey", "404", "NotFound")


def is_refused_write(error: ClientError) -> bool:
    """Return whether S3 refused a request because of its condition IfNoneMatch or IfMatch."""
    return _code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")


def _is_temporary(error: BaseException) -> bool:
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return _code(error) in TEMPORARY or status >= 500
    # HTTPError: the connection breaks while botocore reads the full reply.
    kinds = (
        ConnectionError,
        CredentialRetrievalError,
        HTTPClientError,
        HTTPError,
        IncompleteReadError,
        ResponseParserError,
        TransferFaultError,
    )
    return isinstance(error, kinds)


@contextmanager
def _explained(address: S3Address) -> Iterator[None]:
    """Replace the error of a call by an error that names the object and the remedy."""
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
