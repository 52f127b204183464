"""Leases with times in the future, and machines whose clocks are wrong."""

import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from pipeline.storage import model_lease as lease_module
from pipeline.storage import objects, s3_client
from pipeline.storage.addresses import S3Address
from pipeline.storage.model_lease import LIMIT, Lease
from pipeline.storage.objects import read_object, write_object
from ppo_core.checkpointing.lease import Lease as CheckpointLease
from ppo_core.errors import ConfigError, TrainingError
from tests.helpers.servers.servers import BUCKET, s3

FUTURE = {
    "ten minutes": timedelta(minutes=10),
    "an hour": timedelta(hours=1),
    "25 hours": timedelta(hours=25),
    "a month": timedelta(days=30),
    "ten years": timedelta(days=3652),
    "a thousand years": timedelta(days=365_000),
}

SHIFTS = FUTURE | {f"minus {name}": -shift for name, shift in FUTURE.items()}


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with s3() as values:
        yield values


@pytest.fixture
def lease(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Lease]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3_client.s3_client.cache_clear()
    yield Lease(f"s3://{BUCKET}/{uuid4()}", "policy", "Retrain/1")
    s3_client.s3_client.cache_clear()


def other(lease: Lease) -> Lease:
    return dataclasses.replace(lease, owner="Retrain/2")


def address_of(lease: Lease) -> S3Address:
    return S3Address.parse(lease.store).below("leases/policy.json")


def stored(lease: Lease) -> dict[str, str]:
    found = read_object(address_of(lease))
    assert found
    return dict(json.loads(found[0]))


def store_times(lease: Lease, **times: str) -> None:
    lease.take()
    write_object(address_of(lease), json.dumps(stored(lease) | times).encode())


def set_clock(monkeypatch: pytest.MonkeyPatch, shift: timedelta) -> None:
    """Set the clock of this machine; the store's stays right."""

    class Clock(datetime):
        @classmethod
        def now(cls, zone: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + shift

    monkeypatch.setattr(lease_module, "datetime", Clock)


def wait(monkeypatch: pytest.MonkeyPatch, time: timedelta) -> None:
    """Let time pass, for the store and for this machine."""
    read = objects._time_of
    monkeypatch.setattr(objects, "_time_of", lambda reply: read(reply) + time)
    set_clock(monkeypatch, time)


def in_time(shift: timedelta) -> str:
    return (datetime.now(UTC) + shift).isoformat(timespec="seconds")


@pytest.mark.parametrize("case", FUTURE)
def test_a_lease_of_the_future_is_said_and_ends_after_its_limit(case: str, lease, monkeypatch):
    store_times(lease, renewed=in_time(FUTURE[case]))
    holder = other(lease).take()
    assert "in the future, so the clock of a machine is wrong" in str(holder)
    assert f"ends at {(datetime.now(UTC) + LIMIT).date()}" in str(holder)
    wait(monkeypatch, LIMIT + timedelta(minutes=2))
    assert other(lease).take() is None


@pytest.mark.parametrize(
    "time", ["9999-12-31T23:59:59+00:00", "9999-12-31T23:59:59-23:59", "3000-01-01T00:00:00+14:00"]
)
def test_a_time_at_the_end_of_the_calendar_is_bounded_too(time: str, lease, monkeypatch):
    store_times(lease, renewed=time, taken=time)
    assert "in the future" in str(other(lease).take())
    wait(monkeypatch, LIMIT + timedelta(minutes=2))
    assert other(lease).take() is None


@pytest.mark.parametrize("time", ["tomorrow", "", "2030-01-01", "2030-13-01T00:00:00+00:00"])
def test_a_time_that_is_none_is_refused_by_name(time: str, lease):
    store_times(lease, renewed=time)
    with pytest.raises(ConfigError, match="is not a valid lease"):
        other(lease).take()


def test_a_lease_that_names_more_is_refused(lease):
    store_times(lease, seen="x")
    with pytest.raises(ConfigError, match="is not a valid lease"):
        other(lease).take()


@pytest.mark.parametrize("case", SHIFTS)
def test_a_holder_with_a_wrong_clock_is_told_and_writes_the_right_time(
    case: str, lease, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        set_clock(patch, SHIFTS[case] if abs(SHIFTS[case].days) < 100_000 else timedelta(days=9999))
        assert lease.take() is None
        assert "The clock of this machine is" in capsys.readouterr().err
        lease.renew("RLHF/7")
    for name in ("taken", "renewed"):
        assert abs(datetime.fromisoformat(stored(lease)[name]) - datetime.now(UTC)) < timedelta(
            minutes=1
        )
    assert "in the future" not in str(other(lease).take())
    wait(monkeypatch, LIMIT + timedelta(minutes=2))
    assert other(lease).take() is None


@pytest.mark.parametrize("case", ["25 hours", "a month", "ten years", "minus ten years"])
def test_a_machine_with_a_wrong_clock_takes_no_lease_over(case: str, lease, monkeypatch):
    lease.take()
    set_clock(monkeypatch, SHIFTS[case])
    holder = other(lease).take()
    assert holder is not None and holder.owner == "Retrain/1"


def test_a_right_clock_is_not_worth_a_word(lease, capsys):
    lease.take()
    assert capsys.readouterr().err == ""
    assert "future" not in str(other(lease).take())


@pytest.mark.parametrize("case", FUTURE)
def test_a_lease_of_checkpoints_of_the_future_is_said_and_blocks_nobody(case: str, tmp_path: Path):
    first = CheckpointLease.claim(tmp_path)
    later = dataclasses.replace(first, token=7, started=in_time(FUTURE[case]))
    later._write()
    with pytest.raises(TrainingError, match="in the future, so the clock of a machine is wrong"):
        first.check()
    assert CheckpointLease.claim(tmp_path).token == 8
