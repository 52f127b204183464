"""A run renews the lease while its steps last, and ends if the lease was taken over."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.storage.model_lease import Lease, LeaseLostError
from ppo_core.errors import ConfigError, PPOError, ProcessError, StorageError
from retraining import lease_of_run
from retraining.lease_of_run import KeptLease, release_lease
from tests.flows.retraining.conftest import Bucket
from tests.helpers.paths import ROOT

OWNER, RUN = "Retrain/1", "RLHF/7"

STEP = """
import sys, time
from pipeline.settings.make_settings import make_settings
from retraining import lease_of_run

lease_of_run.RENEWAL_SECONDS = 0.2
settings = make_settings({"task": "tldr", "store": sys.argv[1]}, {}, ())
with lease_of_run.KeptLease("Retrain/1", lambda: settings, "RLHF/7", lambda error: True):
    print("runs", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def settings(bucket: Bucket) -> Settings:
    return make_settings({"task": "tldr", "store": bucket.address("store")}, {}, ())


@pytest.fixture
def lease(settings: Settings) -> Lease:
    made = Lease(settings.store, settings.registered_model, OWNER)
    assert made.take() is None
    return made


def kept(settings: Settings, *, ends_run: bool = False) -> KeptLease:
    return KeptLease(OWNER, lambda: settings, RUN, lambda error: ends_run)


@pytest.mark.parametrize("ends_run", [False, True])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, TimeoutError])
def test_the_lease_is_released_if_the_run_ends_with_the_step(
    settings: Settings, lease: Lease, ends_run: bool, error: type[BaseException] | None
):
    with suppress(ValueError, KeyboardInterrupt, TimeoutError), kept(settings, ends_run=ends_run):
        if error is not None:
            raise error
    assert (replace(lease, owner="Retrain/2").take() is None) is ends_run


def test_a_step_that_hangs_releases_the_lease_without_leaving_its_contexts(
    settings: Settings, lease: Lease
):
    hangs = ProcessError("evaluate_win_rate hangs.")
    step = KeptLease(OWNER, lambda: settings, RUN, lambda error: error is hangs)
    step.__enter__()
    step.end_hung_step(hangs)
    assert replace(lease, owner="Retrain/2").take() is None


@pytest.mark.parametrize("error", [StorageError, ConfigError])
def test_a_renewal_that_fails_is_repeated(
    settings: Settings,
    lease: Lease,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    error: type[PPOError],
):
    """Such as credentials that are missing for a moment."""
    renew, calls = Lease.renew, []

    def fails_once(self: Lease, run: str) -> None:
        calls.append(run)
        if len(calls) == 2:
            raise error("S3 does not answer.")
        renew(self, run)

    monkeypatch.setattr(Lease, "renew", fails_once)
    monkeypatch.setattr(lease_of_run, "RENEWAL_SECONDS", 0.05)
    with kept(settings):
        deadline = time.monotonic() + 20
        while len(calls) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert "The lease could not be renewed: S3 does not answer." in capsys.readouterr().err


def test_the_lease_is_renewed_while_a_step_lasts(
    settings: Settings, lease: Lease, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease_of_run, "RENEWAL_SECONDS", 0.1)
    with kept(settings):
        first = replace(lease, owner="Retrain/2").take()
        deadline = time.monotonic() + 20
        # Times are whole seconds.
        while (last := replace(lease, owner="Retrain/2").take()).renewed == first.renewed:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert (last.run, last.taken) == (RUN, first.taken)


def test_a_step_whose_lease_is_taken_over_ends(settings: Settings, lease: Lease):
    process = subprocess.Popen(
        [sys.executable, "-c", STEP, settings.store],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "runs\n"
    assert replace(lease, owner="Retrain/2").take(take_over=True) is None
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert "is lost: Retrain/2, since" in said


def test_a_step_without_the_lease_does_not_begin(settings: Settings, lease: Lease):
    release_lease(OWNER, settings, RUN)
    with pytest.raises(LeaseLostError, match="nobody has it now"), kept(settings):
        pytest.fail("the step began")


def test_a_run_without_a_lease_asks_nobody():
    offline: Any = "no settings"
    with KeptLease("", lambda: offline, RUN, lambda error: True):
        pass
    release_lease("", offline, RUN)


def test_a_lease_that_cannot_be_released_does_not_fail_the_run(
    settings: Settings, lease: Lease, monkeypatch: pytest.MonkeyPatch, capsys
):
    def unreachable(*_: Any) -> None:
        raise StorageError("S3 does not answer.")

    monkeypatch.setattr(Lease, "release", unreachable)
    release_lease(OWNER, settings, RUN)
    assert "The lease was not released: S3 does not answer." in capsys.readouterr().err
