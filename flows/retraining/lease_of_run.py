"""Keep the lease of a registered model while a run of the flow RLHF uses it."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.settings.settings import Settings
from ppo_core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from pipeline.storage.lease import Lease

RENEWAL_SECONDS = 600.0
"""Seconds between two renewals within a step."""


@contextmanager
def kept_lease(owner: str, settings: Settings | None, run: str) -> Iterator[None]:
    """Renew the lease now, and every RENEWAL_SECONDS while a step lasts.

    If the lease was taken over meanwhile, this process gets SIGTERM, by which a training ends with
    a checkpoint.

    Args:
        owner: owner of the lease; empty for a run that needs none.
        settings: settings of the run; None before the first step has read them.
        run: id of the run.

    Raises:
        ConfigError: the lease is lost, or the run has no store.
        StorageError: S3 does not answer.
    """
    if not owner or settings is None:
        yield
        return
    from pipeline.storage.lease import LeaseLostError

    lease = lease_of(settings, owner)
    lease.renew(run)
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(RENEWAL_SECONDS):
            try:
                lease.renew(run)
            except LeaseLostError as error:
                print(error, file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            # The limit of a lease is much longer than RENEWAL_SECONDS.
            except StorageError as error:
                print(f"The lease could not be renewed: {error}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def lease_of(settings: Settings, owner: str) -> "Lease":
    """Return the lease of the registered model of a run.

    Raises:
        ConfigError: the run has no store in S3.
    """
    # Imported here: they import boto3, which a run without a lease does without.
    from pipeline.storage.lease import Lease
    from pipeline.storage.workspace import workspace_of

    store = workspace_of(settings).store
    if not store:
        raise ConfigError(
            "The flow Retrain needs a store, which holds the lease by which only one run trains at "
            "a time. Set store to an address s3://BUCKET/PREFIX."
        )
    return Lease(store, settings.registered_model, owner)


def release_lease(owner: str, settings: Settings | None, run: str) -> None:
    """Release the lease at the end of a run; print why if that is impossible.

    The result of the run stays as it is: a lease that nobody releases ends at its limit.
    """
    if not owner or settings is None:
        return
    try:
        lease_of(settings, owner).release(run)
    except (ConfigError, StorageError) as error:
        print(f"The lease was not released: {error}", file=sys.stderr, flush=True)
