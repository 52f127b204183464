"""The lease of a registered model: at most one run at a time trains its next version."""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from botocore.exceptions import ClientError

from pipeline.storage.addresses import S3Address
from pipeline.storage.objects import TimedObject, read_timed_object, write_object
from pipeline.storage.s3_client import is_missing, is_refused_write
from ppo_core.errors import ConfigError, StorageError
from ppo_core.errors.control_characters import escape_controls
from ppo_core.errors.wrong_clock import TOLERANCE, describe_duration, describe_future
from ppo_core.io.text_files import parse_strict_json
from ppo_core.io.validation import read_record

LIMIT = timedelta(hours=24)
"""Time after which a lease that was not renewed may be taken over. It exceeds the time for which a
step waits for its machine, because nothing renews the lease during the wait."""

FOLDER = "leases"
"""Folder of the leases in the store."""


class LeaseLostError(ConfigError):
    """The lease belongs to another run, so this run must not register anything."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The owner of a lease, as stored in S3."""

    owner: str
    """Run that took the lease; empty after it released the lease."""

    run: str
    """Run of the flow RLHF that uses the lease; empty until it has started."""

    taken: str
    """Time at which the owner took the lease, ISO 8601 in UTC."""

    renewed: str
    """Time of the last renewal, ISO 8601 in UTC, by the clock of the store."""

    seen: TimedObject | None = field(default=None, compare=False)
    """The object from which the holder was read, with times by the clock of the store."""

    def __str__(self) -> str:
        """Return the owner, the run that trains, and both times, for messages.

        A time in the future is marked. If `renewed` is in the future, the text also has the time at
        which the lease ends.
        """
        run = f" for {self.run}" if self.run else ""
        now = self.seen.now if self.seen else None
        future = describe_future(self.renewed, now)
        if future and self.seen:
            end = (self.seen.written + LIMIT).isoformat(timespec="minutes")
            future += f"; if nobody renews it, the lease ends at {end}"
        return escape_controls(
            f"{self.owner}{run}, since {self.taken}{describe_future(self.taken, now)}, renewed "
            f"{self.renewed}{future}"
        )

    def is_over(self) -> bool:
        """Return whether another run may take the lease, because it was released or not renewed.

        The age is counted from the time at which the store received the lease, because `renewed`
        may come from a wrong clock.
        """
        return not self.owner or (
            self.seen is not None and self.seen.now - self.seen.written > LIMIT
        )


@dataclass(frozen=True)
class Lease:
    """The lease of one registered model for one owner.

    Each change is one conditional write. If two runs change the lease at once, one of them fails.
    All times are by the clock of the store, because the clocks of two machines may differ.
    """

    store: str
    """Address of the store."""

    name: str
    """Name of the registered model."""

    owner: str
    """Run that takes the lease."""

    def take(self, *, take_over: bool = False) -> Holder | None:
        """Take the lease. Return None on success; otherwise the holder, who keeps the lease.

        `take_over` takes over any lease. Without it, only a lease that was not renewed for `LIMIT`
        is taken over.

        Raises:
            ConfigError: S3 refuses the access, or the object is not a lease.
            StorageError: S3 does not answer.
        """
        now = read_timed_object(self._address).now
        self._say_wrong_clock(now)
        begun = Holder(owner=self.owner, run="", taken=_text(now), renewed=_text(now))
        found = self._read()
        if found is None:
            return self._write(begun, IfNoneMatch="*")
        holder, version = found
        if holder.owner == self.owner:
            return None
        if not (take_over or holder.is_over()):
            return holder
        if holder.owner:
            print(f"Warning: The lease of '{self.name}' is taken over from {holder}.", flush=True)
        return self._write(begun, IfMatch=version)

    def renew(self, run: str) -> None:
        """Renew the lease for a run of the flow RLHF; only the first run that renews it may use it.

        Raises:
            LeaseLostError: the lease was taken over or released, or another run uses it.
            StorageError: S3 does not answer.
        """
        found = self._read()
        if found is None or not self._has(found[0], run):
            raise self._lost(found and found[0])
        holder, version = found
        now = holder.seen.now if holder.seen else datetime.now(UTC)
        renewed = dataclasses.replace(holder, run=run, renewed=_text(now))
        other = self._write(renewed, IfMatch=version)
        # Another machine of the same run may have renewed the lease at the same time.
        if other is not None and not self._has(other, run):
            raise self._lost(other)

    def release(self, run: str | None = None) -> None:
        """Release the lease, so that the next run does not wait for `LIMIT`.

        Do nothing if the lease now belongs to another run. If `run` is None, release the lease, no
        matter which run of the flow RLHF uses it.

        Raises:
            StorageError: S3 does not answer.
        """
        found = self._read()
        while found is not None and self._has(found[0], found[0].run if run is None else run):
            holder, version = found
            if self._write(dataclasses.replace(holder, owner="", run=""), IfMatch=version) is None:
                return
            # Another machine of the same run has just renewed the lease.
            found = self._read()

    @property
    def _address(self) -> S3Address:
        return S3Address.parse(self.store).below(f"{FOLDER}/{self.name}.json")

    def _has(self, holder: Holder, run: str) -> bool:
        return holder.owner == self.owner and holder.run in ("", run)

    def _say_wrong_clock(self, now: datetime) -> None:
        ahead = datetime.now(UTC) - now
        if abs(ahead) > TOLERANCE:
            side = "ahead of" if ahead > timedelta(0) else "behind"
            print(
                f"Warning: The clock of this machine is {describe_duration(ahead)} {side} the "
                f"store's, so the lease of '{self.name}' has the store's time. Set the clock.",
                file=sys.stderr,
                flush=True,
            )

    def _read(self) -> tuple[Holder, str] | None:
        """Return the holder of the lease and the version of the object; None if there is none."""
        found = read_timed_object(self._address)
        return None if found.content is None else (self._decoded(found), found.version)

    def _decoded(self, found: TimedObject) -> Holder:
        try:
            fields = parse_strict_json((found.content or b"").decode())
            holder = Holder(**read_record(fields, dict[str, str]), seen=found)
            if datetime.fromisoformat(holder.renewed).tzinfo is None:
                raise ValueError(f"renewed is '{holder.renewed}', a time without its zone")
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"'{self._address}' is not a valid lease ({error}). Find out which program wrote "
                "it. If no run is training, delete the object."
            ) from error
        return holder

    def _write(self, holder: Holder, **condition: str) -> Holder | None:
        """Write the lease. Return None on success; otherwise the holder that wrote it first."""
        fields = {name: getattr(holder, name) for name in ("owner", "run", "taken", "renewed")}
        content = json.dumps(fields).encode()
        try:
            write_object(self._address, content, **condition)
        except ClientError as error:
            if not (is_refused_write(error) or is_missing(error)):
                raise
            found = self._read()
            if found is None:
                raise StorageError(f"'{self._address}' was just removed. Start again.") from error
            # If only the reply to the first attempt was lost, the lease is written, and S3 refuses
            # the second attempt.
            return None if found[0] == holder else found[0]
        return None

    def _lost(self, holder: Holder | None) -> LeaseLostError:
        now = f"{holder} has it now" if holder and holder.owner else "nobody has it now"
        return LeaseLostError(
            f"The lease of '{self.name}', which {self.owner} took, is lost: {now}. This run ends, "
            "so that only one run registers a version. Its models stay in the store, and the next "
            "run that the flow Retrain starts reuses them."
        )


def _text(time: datetime) -> str:
    return time.isoformat(timespec="seconds")
