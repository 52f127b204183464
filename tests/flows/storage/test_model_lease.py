"""The lease of a registered model: however runs meet, one of them has it."""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from pipeline.storage import objects
from pipeline.storage.addresses import S3Address
from pipeline.storage.model_lease import LIMIT, Lease, LeaseLostError
from pipeline.storage.objects import (
    read_object,
    read_timed_object,
    remove_objects,
    write_object,
)
from ppo_core.errors import ConfigError, StorageError
from tests.helpers.servers.s3_faults import S3Faults
from tests.helpers.servers.servers import BUCKET

pytestmark = pytest.mark.usefixtures("faults")


@pytest.fixture
def lease() -> Lease:
    return Lease(f"s3://{BUCKET}/{uuid4()}", "policy", "Retrain/1")


def other(lease: Lease, owner: str = "Retrain/2") -> Lease:
    return dataclasses.replace(lease, owner=owner)


def address_of(lease: Lease) -> S3Address:
    return S3Address.parse(lease.store).below("leases/policy.json")


def wait(monkeypatch: pytest.MonkeyPatch, duration: timedelta) -> None:
    """Let the clock of the store go forward."""
    read = objects._time_of
    monkeypatch.setattr(objects, "_time_of", lambda reply: read(reply) + duration)


def test_one_of_many_that_start_at_once_has_the_lease(lease: Lease):
    owners = [f"Retrain/{number}" for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        holders = list(pool.map(lambda owner: other(lease, owner).take(), owners))
    (winner,) = [owner for owner, holder in zip(owners, holders, strict=True) if holder is None]
    assert {holder.owner for holder in holders if holder} == {winner}


def test_a_second_run_gets_the_name_of_the_holder_and_of_its_run(lease: Lease):
    assert lease.take() is None
    lease.renew("RLHF/7")
    assert str(other(lease).take()).startswith("Retrain/1 for RLHF/7, since 20")


def test_a_released_lease_can_be_taken(lease: Lease):
    lease.take()
    lease.renew("RLHF/7")
    lease.release("RLHF/7")
    assert other(lease).take() is None


def test_a_lease_is_released_while_another_machine_renews_it(
    lease: Lease, monkeypatch: pytest.MonkeyPatch
):
    lease.take()
    lease.renew("RLHF/7")
    read = Lease._read

    def read_before_the_renewal(self: Lease) -> object:
        found = read(self)
        monkeypatch.setattr(Lease, "_read", read)
        wait(monkeypatch, timedelta(minutes=1))
        self.renew("RLHF/7")
        return found

    monkeypatch.setattr(Lease, "_read", read_before_the_renewal)
    lease.release("RLHF/7")
    assert other(lease).take() is None


@pytest.mark.parametrize("run", ["RLHF/8", "RLHF/7", None])
def test_a_run_without_the_lease_releases_nothing(lease: Lease, run: str | None):
    lease.take()
    lease.renew("RLHF/7")
    (lease if run == "RLHF/8" else other(lease)).release(run)
    assert other(lease).take().run == "RLHF/7"


def test_the_owner_releases_the_lease_of_a_run_that_it_started(lease: Lease):
    lease.take()
    lease.renew("RLHF/7")
    lease.release()
    assert other(lease).take() is None


def test_the_owner_may_take_the_lease_again(lease: Lease):
    assert [lease.take(), lease.take()] == [None, None]


@pytest.mark.parametrize(("ago", "is_taken"), [(LIMIT * 0.99, False), (LIMIT * 1.01, True)])
def test_only_a_lease_past_its_limit_is_taken_over(
    lease: Lease, ago: timedelta, is_taken: bool, monkeypatch: pytest.MonkeyPatch
):
    lease.take()
    wait(monkeypatch, ago)
    assert (other(lease).take() is None) is is_taken


def test_the_clock_of_the_machine_that_renewed_does_not_count(lease: Lease):
    """Earlier releases wrote the time of their own machine."""
    lease.take()
    content, _ = read_object(address_of(lease))
    old = json.loads(content) | {"renewed": (datetime.now(UTC) - LIMIT * 2).isoformat()}
    write_object(address_of(lease), json.dumps(old).encode())
    assert other(lease).take() is not None


def test_a_person_may_take_over_and_the_earlier_run_ends(
    lease: Lease, capsys: pytest.CaptureFixture[str]
):
    lease.take()
    lease.renew("RLHF/7")
    assert other(lease).take(take_over=True) is None
    assert "taken over from Retrain/1 for RLHF/7" in capsys.readouterr().out
    with pytest.raises(LeaseLostError, match=r"is lost: Retrain/2, since .* This run ends"):
        lease.renew("RLHF/7")


def test_only_the_first_run_that_is_started_for_a_lease_uses_it(lease: Lease):
    lease.take()
    lease.renew("RLHF/7")
    lease.renew("RLHF/7")
    with pytest.raises(LeaseLostError, match="Retrain/1 for RLHF/7"):
        lease.renew("RLHF/8")


def test_a_renewal_moves_the_limit(lease: Lease):
    lease.take()
    taken = read_timed_object(address_of(lease)).written
    time.sleep(1.1)
    lease.renew("RLHF/7")
    assert read_timed_object(address_of(lease)).written > taken


def test_lost_replies_do_not_lose_the_lease(lease: Lease, faults: S3Faults):
    """S3 has done what a call asked for, and refuses the repeated call."""
    faults.kinds, faults.share = ("lost",), 0.4
    assert lease.take() is None
    for _ in range(10):
        lease.renew("RLHF/7")
    lease.release("RLHF/7")
    assert other(lease).take() is None
    assert faults.counts["lost"] > 5


def test_a_lease_that_is_removed_during_a_renewal_is_said(
    lease: Lease, monkeypatch: pytest.MonkeyPatch
):
    lease.take()
    read = Lease._read

    def read_and_remove(self: Lease) -> object:
        found = read(self)
        if found is not None:
            remove_objects(address_of(self), [address_of(self).key])
        return found

    monkeypatch.setattr(Lease, "_read", read_and_remove)
    with pytest.raises(StorageError, match=r"was just removed\. Start again"):
        lease.renew("RLHF/7")


@pytest.mark.parametrize("content", ["", "[]", '{"owner": 1}', '{"owner": "a", "run": "b"}'])
def test_another_object_at_the_address_is_refused_by_name(lease: Lease, content: str):
    write_object(address_of(lease), content.encode())
    with pytest.raises(ConfigError, match=r"leases/policy.json' is not a valid lease"):
        lease.take()
