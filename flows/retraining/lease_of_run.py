"""Renew the lease of a registered model during a run of the flow RLHF, and release it at the end.

The lease, an object in the store, names the one run that may train the model.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from pipeline.settings.settings import Settings
from ppo_core.errors import ConfigError, ProcessError, StorageError

if TYPE_CHECKING:
    from pipeline.storage.model_lease import Lease

RENEWAL_SECONDS = 60.0
"""Seconds between two renewals within a step."""


class KeptLease:
    """Renews a lease during a step, and releases the lease if the run ends with this step.

    If another run takes over the lease, this class sends SIGTERM to this process. A training then
    saves a checkpoint and ends.
    """

    def __init__(
        self,
        owner: str,
        read_settings: Callable[[], Settings | None],
        run: str,
        ends_run: Callable[[BaseException | None], bool],
    ) -> None:
        """Store the arguments; entering the context renews the lease.

        Args:
            owner: owner of the lease; empty for a run that needs no lease.
            read_settings: returns the settings of the run; None before the first step has read
                them.
            run: id of the run.
            ends_run: takes the error of the step, or None; returns whether the run ends now.
        """
        self._owner, self._run = owner, run
        self._read_settings, self._ends_run = read_settings, ends_run
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        """Renew the lease now, and then every RENEWAL_SECONDS; do nothing if there is no lease.

        Raises:
            ConfigError: the lease is lost, or the run has no store.
            StorageError: S3 does not answer.
        """
        settings = self._read_settings()
        if not self._owner or settings is None:
            return
        lease = lease_of(settings, self._owner)
        lease.renew(self._run)
        self._thread = threading.Thread(target=self._renew, args=[lease], name="lease", daemon=True)
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the renewals, and release the lease if the run is over."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self._ends_run(error):
            release_lease(self._owner, self._read_settings(), self._run)

    def end_hung_step(self, error: ProcessError) -> None:
        """Before the process ends: stop the renewals, and release the lease as after an error."""
        self.__exit__(ProcessError, error, None)

    def _renew(self, lease: "Lease") -> None:
        from pipeline.storage.model_lease import LeaseLostError

        while not self._is_over.wait(RENEWAL_SECONDS):
            try:
                lease.renew(self._run)
            except LeaseLostError as error:
                print(error, file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            # A renewal may fail, for example while credentials are missing. The lease expires much
            # later than RENEWAL_SECONDS, so the next renewal is still in time.
            except (ConfigError, StorageError) as error:
                print(
                    f"Warning: The lease could not be renewed: {error}", file=sys.stderr, flush=True
                )


def lease_of(settings: Settings, owner: str) -> "Lease":
    """Return the lease of the registered model of a run.

    Raises:
        ConfigError: the run has no store in S3.
    """
    # Imported here, because these modules import boto3, which a run without a lease does not need.
    from pipeline.storage.model_lease import Lease
    from pipeline.storage.workspace import workspace_of

    store = workspace_of(settings).store
    if not store:
        raise ConfigError(
            "The flow Retrain needs a store for its lease. With the lease, only one run trains at "
            "a time. Set store to an address s3://BUCKET/PREFIX."
        )
    return Lease(store, settings.registered_model, owner)


def release_lease(owner: str, settings: Settings | None, run: str) -> None:
    """Release the lease at the end of a run; if the release fails, print the reason.

    A failure does not change the result of the run, because a lease that is not released expires.
    """
    if not owner or settings is None:
        return
    try:
        lease_of(settings, owner).release(run)
    except (ConfigError, StorageError) as error:
        print(f"Warning: The lease was not released: {error}", file=sys.stderr, flush=True)
