"""Two writers on one folder of checkpoints: the newest claim wins, the earlier one stops."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from ppo_core.checkpointing import lease as lease_module
from ppo_core.checkpointing.folders import STATE
from ppo_core.checkpointing.lease import LEASE, LOCK, Lease
from ppo_core.checkpointing.read_checkpoint import read_newest
from ppo_core.checkpointing.write_checkpoint import Part, save_checkpoint
from ppo_core.errors import TrainingError
from tests.helpers.paths import ROOT


def save(output_dir: Path, step: int, lease: Lease) -> None:
    part = Part(documents={STATE: json.dumps({"by": lease.token})})
    folder = output_dir / f"checkpoint-{step}"
    save_checkpoint(folder, part, writer=str(lease.token), held=lease.held)


def test_claims_are_numbered_and_the_folder_is_created(tmp_path):
    folder = tmp_path / "new" / "run"
    assert [Lease.claim(folder).token for _ in range(3)] == [1, 2, 3]


def test_the_last_claim_is_valid_and_the_previous_one_names_the_new_holder(tmp_path):
    first = Lease.claim(tmp_path)
    first.check()
    second = Lease.claim(tmp_path)
    second.check()
    with pytest.raises(TrainingError, match=rf"took over.*process {os.getpid()} on .*\(token 2,"):
        first.check()
    with pytest.raises(TrainingError, match="took over"), first.held():
        pytest.fail("an earlier writer was let in")


def test_a_lease_that_was_removed_is_no_lease(tmp_path):
    lease = Lease.claim(tmp_path)
    (tmp_path / LEASE).unlink()
    with pytest.raises(TrainingError, match=r"an unknown process, because .*lease\.json"):
        lease.check()


def test_a_lease_that_cannot_be_read_is_not_overwritten(tmp_path):
    (tmp_path / LEASE).write_text('{"token": 1}')
    with pytest.raises(TrainingError, match=r"lease\.json' cannot be read.*remove the file"):
        Lease.claim(tmp_path)
    assert (tmp_path / LEASE).read_text() == '{"token": 1}'


def test_waiting_for_a_frozen_writer_ends_with_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "TIMEOUT", 0.1)
    lease = Lease.claim(tmp_path)
    with FileLock(tmp_path / LOCK), pytest.raises(TrainingError) as raised:
        Lease.claim(tmp_path)
    assert str(lease) in str(raised.value) and "End that process" in str(raised.value)


def test_the_previous_writer_publishes_and_removes_no_checkpoint(tmp_path):
    first, second = Lease.claim(tmp_path), Lease.claim(tmp_path)
    save(tmp_path, 4, second)
    for step in (4, 5):
        with pytest.raises(TrainingError, match="took over"):
            save(tmp_path, step, first)
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-4"]
    assert read_newest(tmp_path).state == {"by": 2}


WRITER = """
import sys
from pathlib import Path
from ppo_core.errors import TrainingError
from ppo_core.checkpointing.lease import Lease
from tests.ppo_core.checkpointing.test_lease import save

output_dir = Path(sys.argv[1])
lease = Lease.claim(output_dir)
save(output_dir, 1, lease)
print("ready", flush=True)
sys.stdin.readline()
try:
    save(output_dir, 2, lease)
except TrainingError as error:
    print(error)
"""


def test_a_writer_that_was_frozen_while_another_took_over_stops(tmp_path):
    frozen = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert frozen.stdout.readline() == "ready\n"
        frozen.send_signal(signal.SIGSTOP)
        mine = Lease.claim(tmp_path)
        save(tmp_path, 2, mine)
        frozen.send_signal(signal.SIGCONT)
        said, _ = frozen.communicate("go on\n", timeout=60)
    finally:
        frozen.kill()
    assert f"took over '{tmp_path}': {mine}. This process (process {frozen.pid}" in said
    assert read_newest(tmp_path).state == {"by": mine.token}
    assert mine.token == 2
