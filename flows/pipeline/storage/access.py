"""Check before a run that it may write, replace and remove objects in its store in S3."""

import os
import socket

from botocore.exceptions import ClientError

from pipeline.storage.addresses import S3Address
from pipeline.storage.objects import read_object, remove_objects, write_object
from pipeline.storage.s3_client import is_refused_write
from ppo_core.errors import ConfigError

PROBE = b"A run checks whether it may write here. This object may be removed.\n"


def check_store(store: S3Address) -> None:
    """Write, read and remove a small object in a store, as the steps of a run do.

    Raises:
        ConfigError: S3 refuses a call, or ignores the condition of a write.
        StorageError: S3 does not answer.
    """
    probe = store.below(f"access-{socket.gethostname()}-{os.getpid()}")
    write_object(probe, PROBE)
    try:
        found = read_object(probe)
        if found is None or found[0] != PROBE:
            raise ConfigError(
                f"{probe} does not contain the bytes that were just written. Set store to an "
                "address in S3."
            )
        if not _refuses_second_write(probe):
            raise ConfigError(
                f"{store} ignores the condition IfNoneMatch of a write, so two runs could replace "
                "each other's files. Set store to an address in S3, or in a service that supports "
                "conditional writes."
            )
    finally:
        remove_objects(probe, [probe.key])


def _refuses_second_write(probe: S3Address) -> bool:
    try:
        write_object(probe, PROBE, IfNoneMatch="*")
    except ClientError as error:
        if is_refused_write(error):
            return True
        raise
    return False
