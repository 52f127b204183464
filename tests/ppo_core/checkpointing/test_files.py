"""Checkpoints: exact bit for bit, complete or absent, and verified before use."""

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, tensor
from torch.optim import lr_scheduler

from ppo_core.checkpointing.folders import STATE
from ppo_core.checkpointing.optimizer_options import (
    check_optimizer_fits,
    optimizer_options,
    restore_options,
    restore_schedule,
    set_schedule_step,
)
from ppo_core.checkpointing.read_checkpoint import read_checkpoint, read_newest
from ppo_core.checkpointing.write_checkpoint import Part, save_checkpoint
from ppo_core.distributed.exchange_objects import ProcessGroup
from ppo_core.errors import TrainingError
from ppo_core.io.random_state import (
    generator_tensors,
    global_rng_state,
    restore_generators,
    restore_global_rng_state,
)
from tests.helpers.paths import ROOT


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def save(output_dir: Path, step: int, *, value: float = 0.0, keep=None, **changes) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    part = {
        "groups": {"critic": {"weight": torch.full((3,), value)}, "ema": {}},
        "documents": {STATE: json.dumps({"step": step, "episodes": 8 * step})},
        "write_policy": write_config,
        **changes,
    }
    save_checkpoint(folder, Part(**part), keep=keep)
    return folder


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


def optimizer_of(*shapes, kind=torch.optim.AdamW, dtype=torch.float32, steps=1):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    optimizer = kind(parameters, lr=0.1)
    for _ in range(steps):
        sum((parameter**2).sum() for parameter in parameters).backward()
        optimizer.step()
    return optimizer


def two_groups():
    optimizer = optimizer_of((2, 3), steps=0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
    return optimizer


# --- Round trip ----------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        tensor(2.5),
        tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        tensor(7),
        torch.empty(0, 3),
        tensor([True, False]),
        torch.arange(6.0).view(2, 3).T,
    ],
    ids=["0-d", "bf16", "integer", "empty", "bool", "transposed"],
)
def test_every_kind_of_tensor_is_restored_bit_for_bit(tmp_path, value):
    folder = save(tmp_path, 1, groups={"g": {"x": value}})
    read = read_checkpoint(folder).tensors("g")["x"]
    assert read.dtype == value.dtype and read.shape == value.shape
    flat, expected = (t.contiguous().view(-1).view(torch.uint8) for t in (read, value))
    assert torch.equal(flat, expected)


def test_tied_weights_are_restored_under_both_names(tmp_path):
    weight = torch.randn(3)
    folder = save(tmp_path, 1, groups={"critic": {"a": weight, "b": weight, "part": weight[1:]}})
    read = read_checkpoint(folder).tensors("critic")
    assert torch.equal(read["a"], weight) and torch.equal(read["b"], weight)
    assert torch.equal(read["part"], weight[1:])


def test_groups_and_json_state_are_restored(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, 12, value=3.0))
    assert checkpoint.state == {"step": 12, "episodes": 96}
    assert checkpoint.tensors("critic")["weight"].tolist() == [3.0] * 3
    assert dict(checkpoint.tensors("ema")) == dict(checkpoint.tensors("not there")) == {}


def test_a_group_that_several_processes_wrote_is_one(tmp_path):
    groups = {"optimizer-0": {"a": tensor(0)}, "optimizer-11": {"b": tensor(1)}, "optim": {}}
    checkpoint = read_checkpoint(save(tmp_path, 1, groups=groups))
    assert dict(checkpoint.tensors("optimizer")) == {"a": tensor(0), "b": tensor(1)}


# --- Complete or absent -------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["critic.safetensors", "ema.safetensors", "trainer_state.json", "config.json"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_a_damaged_file_is_named(tmp_path, file, damage):
    path = save(tmp_path, 1) / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(TrainingError, match=rf"{file}' .*\. Resume from an earlier checkpoint"):
        read_checkpoint(tmp_path / "checkpoint-1")


def test_no_byte_of_the_manifest_can_change_a_checkpoint_unseen(tmp_path):
    folder = save(tmp_path, 1)
    manifest = folder / "manifest.json"
    content = manifest.read_bytes()
    for place, byte in enumerate(content):
        manifest.write_bytes(content[:place] + bytes([byte ^ 1]) + content[place + 1 :])
        if chr(byte) in " \n":
            continue
        with pytest.raises(TrainingError, match="Resume from an earlier checkpoint"):
            read_checkpoint(folder)
    manifest.write_bytes(content[: len(content) // 2])
    with pytest.raises(TrainingError, match=r"manifest\.json' is damaged"):
        read_checkpoint(folder)
    manifest.unlink()
    with pytest.raises(TrainingError, match=r"no manifest\.json.*never finished"):
        read_checkpoint(folder)
    with pytest.raises(TrainingError, match=r"There is no folder '.*checkpoint-2'"):
        read_checkpoint(tmp_path / "checkpoint-2")


KILLED_HALF_WAY = """
import sys, torch
from pathlib import Path
from ppo_core.checkpointing.write_checkpoint import Part, save_checkpoint

def save(step, write_policy):
    large = {str(i): torch.full((1 << 20,), float(step)) for i in range(4)}
    part = Part(
        groups={"critic": large},
        documents={"trainer_state.json": f'{{"step": {step}}}'},
        write_policy=write_policy,
    )
    save_checkpoint(Path(sys.argv[1]) / f"checkpoint-{step}", part)

def stop_half_way(folder):
    (folder / "model.safetensors").write_bytes(b"half")
    print("half way", flush=True)
    sys.stdin.read()

save(1, lambda folder: None)
save(2, stop_half_way)
"""


def test_a_killed_process_leaves_the_last_good_checkpoint(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_HALF_WAY, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "half way\n"
    process.kill()
    process.communicate()

    assert names(tmp_path) == [".checkpoint-2.partial-0", "checkpoint-1"]
    checkpoint = read_newest(tmp_path)
    assert checkpoint.state["step"] == 1
    assert all((value == 1).all() for value in checkpoint.tensors("critic").values())
    save(tmp_path, 3)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]


KILLED_AT_EVERY_OPERATION = """
import os, signal, sys, torch
from itertools import count
from pathlib import Path
from ppo_core.checkpointing.read_checkpoint import read_newest
from ppo_core.checkpointing.write_checkpoint import Part, save_checkpoint

output_dir = Path(sys.argv[1])

def save(turn):
    part = Part(
        groups={"critic": {"weight": torch.tensor(turn)}},
        documents={"trainer_state.json": f'{{"turn": {turn}}}'},
        write_policy=lambda folder: (folder / "config.json").write_text("{}"),
    )
    save_checkpoint(output_dir / "checkpoint-7", part)

def kill_before_operation(number):
    seen = count()
    def watch(event, _):
        of_files = event == "open" or event.startswith(("os.", "shutil."))
        if of_files and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)

save(0)
for turn in count(1):
    child = os.fork()
    if child == 0:
        kill_before_operation(turn - 1)
        save(turn)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    checkpoint = read_newest(output_dir)
    assert checkpoint.tensors("critic")["weight"] == checkpoint.state["turn"]
    print(turn, checkpoint.state["turn"])
    if status == 0:
        break
"""


def test_killed_before_any_file_operation_the_old_or_the_new_checkpoint_is_there(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_OPERATION, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    turns = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    saved = [0, *(read for _, read in turns)]
    for number, (turn, read) in enumerate(turns):
        assert read in (turn, saved[number])
    killed = turns[:-1]
    assert len([turn for turn, read in killed if read != turn]) > 10
    assert [turn for turn, read in killed if read == turn]
    assert names(tmp_path) == ["checkpoint-7"]


def test_every_file_and_name_is_on_the_disk_before_the_checkpoint_takes_its_place(
    tmp_path, monkeypatch
):
    flushed, renamed = [], []

    def fsync(handle: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

    def rename(path: Path, target: Path) -> Path:
        if target.name == "checkpoint-1":
            renamed.extend(flushed)
        return Path(shutil.move(path, target))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    folder = save(tmp_path, 1)
    assert set(renamed) == {".checkpoint-1.partial-0", *names(folder)}
    assert flushed[len(renamed) :] == [tmp_path.name]


def test_a_checkpoint_that_outgrows_the_disk_leaves_the_earlier_ones(tmp_path):
    save(tmp_path, 1, value=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(TrainingError, match=r"step 2 could not be written.*too large.*Free"):
            save(tmp_path, 2, groups={"critic": {"weight": torch.zeros(1 << 16)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["checkpoint-1"]
    assert read_newest(tmp_path).state["step"] == 1


def test_an_old_checkpoint_that_cannot_be_removed_leaves_the_new_one(tmp_path, monkeypatch):
    def rename(path: Path, target: Path) -> Path:
        if path.name == "checkpoint-1":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return Path(shutil.move(path, target))

    save(tmp_path, 1)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(TrainingError, match=r"checkpoint-2' is complete.*checkpoint-1'.*resume"):
        save(tmp_path, 2, keep=1)
    assert read_newest(tmp_path).state["step"] == 2


def test_a_disk_that_fills_up_while_a_step_is_replaced_leaves_the_earlier_one(tmp_path):
    def fill_up(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 1, value=1.0)
    with pytest.raises(TrainingError, match="No space left on device"):
        save(tmp_path, 1, value=2.0, write_policy=fill_up)
    assert names(tmp_path) == ["checkpoint-1"]
    checkpoint = read_checkpoint(tmp_path / "checkpoint-1")
    assert checkpoint.tensors("critic")["weight"].tolist() == [1.0] * 3


def test_an_error_in_writing_the_policy_leaves_no_folder_behind(tmp_path):
    def fail(folder: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 1, write_policy=fail)
    assert names(tmp_path) == []


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1, value=1.0)
    save(tmp_path, 1, value=2.0)
    assert names(tmp_path) == ["checkpoint-1"]
    checkpoint = read_checkpoint(tmp_path / "checkpoint-1")
    assert checkpoint.tensors("critic")["weight"].tolist() == [2.0] * 3


def test_a_run_killed_between_the_two_renames_still_has_the_earlier_one(tmp_path):
    save(tmp_path, 9)
    save(tmp_path, 10, value=1.0).rename(tmp_path / "checkpoint-10.old")
    latest = read_newest(tmp_path)
    assert latest.folder == tmp_path / "checkpoint-10.old"
    assert latest.state["step"] == 10
    save(tmp_path, 10, value=2.0)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9"]


def test_a_replaced_checkpoint_that_was_not_removed_yet_is_never_read_again(tmp_path):
    save(tmp_path, 9).rename(tmp_path / "checkpoint-9.old")
    shutil.copytree(save(tmp_path, 10), tmp_path / "checkpoint-10.old")
    (tmp_path / "checkpoint-best.old").mkdir()
    assert read_newest(tmp_path).folder == tmp_path / "checkpoint-10"
    save(tmp_path, 11)
    # That of step 9 is the only one of its step.
    assert names(tmp_path) == [
        "checkpoint-10",
        "checkpoint-11",
        "checkpoint-9.old",
        "checkpoint-best.old",
    ]


def test_a_group_named_like_the_policys_file_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"model\.safetensors.*report it"):
        save(
            tmp_path,
            1,
            groups={"model": {}},
            write_policy=lambda folder: (folder / "model.safetensors").touch(),
        )
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["final", "checkpoint-", "checkpoint-3.old"])
def test_a_folder_that_would_not_be_found_again_is_refused(tmp_path, name):
    with pytest.raises(TrainingError, match="checkpoint-<step>"):
        save_checkpoint(tmp_path / name, Part())


# --- Finding and removing ------------------------------------------------------


def test_the_latest_is_the_highest_number_not_the_last_name(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert read_newest(tmp_path).folder == tmp_path / "checkpoint-100"


def test_an_unfinished_folder_is_skipped(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-final").mkdir()
    assert read_newest(tmp_path).folder == tmp_path / "checkpoint-1"


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert read_newest(tmp_path) is None
    assert read_newest(tmp_path / "not there") is None


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(2, [9, 10]), (3, [2, 9, 10]), (5, [2, 9, 10]), (None, [2, 9, 10])],
)
def test_the_oldest_checkpoints_are_removed_first(tmp_path, keep, kept):
    for step in (2, 9):
        save(tmp_path, step)
    (tmp_path / "checkpoint-1").mkdir()
    save(tmp_path, 10, keep=keep)
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in [1, *kept])


def test_an_old_checkpoint_with_a_file_that_cannot_be_removed_yet_is_removed_later(
    tmp_path, monkeypatch
):
    # On NFS, the file that a reader has open stays in the folder under another name.
    unlink = os.unlink

    def keep_files_of_trees(path, *, dir_fd=None):
        if dir_fd is not None:
            raise OSError(errno.EBUSY, "Device or resource busy")
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", keep_files_of_trees)
        for step in (1, 2, 3, 1, 4, 5):
            save(tmp_path, step, keep=2)
    assert read_newest(tmp_path).state["step"] == 5
    save(tmp_path, 6, keep=2)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]


def test_checkpoints_later_than_the_resumed_one_are_renamed_and_never_resumed_from(tmp_path):
    for step in (1, 2, 8, 9):
        save(tmp_path, step)
    save(tmp_path, 3, keep=2)
    aside = ["checkpoint-8.superseded", "checkpoint-9.superseded"]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", *aside]
    assert read_newest(tmp_path).folder.name == "checkpoint-3"


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(2, "3 8 9.superseded"), (None, "2 3 8 8.superseded 9.superseded")],
)
def test_with_a_limit_abandoned_checkpoints_are_removed_at_their_steps(tmp_path, keep, kept):
    for step in (2, 8, 9, 3):
        save(tmp_path, step)
    save(tmp_path, 8, keep=keep)
    assert names(tmp_path) == [f"checkpoint-{one}" for one in kept.split()]


# --- Damage --------------------------------------------------------------------


def truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path, other: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def remove(path: Path, other: Path) -> None:
    path.unlink()


def take_that_of_another_step(path: Path, other: Path) -> None:
    shutil.copyfile(other / path.name, path)


FILES = [
    "config.json",
    "critic.safetensors",
    "ema.safetensors",
    "manifest.json",
    "trainer_state.json",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove, take_that_of_another_step])
def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(tmp_path, caplog, damage, file):
    contents = [{"write_policy": lambda f, n=n: (f / "config.json").write_text(n)} for n in "123"]
    for step, content in enumerate(contents, start=1):
        groups = {"critic": {"w": tensor(step)}, "ema": {"w": tensor(step)}}
        save(tmp_path, step, groups=groups, **content)
    assert sorted(path.name for path in (tmp_path / "checkpoint-3").iterdir()) == FILES
    assert read_newest(tmp_path).state["step"] == 3
    damage(tmp_path / "checkpoint-3" / file, tmp_path / "checkpoint-2")
    checkpoint = read_newest(tmp_path)
    assert checkpoint.state["step"] == 2 and checkpoint.tensors("critic")["w"] == 2
    (warning,) = caplog.messages
    assert "checkpoint-3' and trying the previous one" in warning
    if (damage, file) != (take_that_of_another_step, "manifest.json"):
        assert file in warning


def test_where_all_are_damaged_each_is_named(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "config.json").unlink()
    with pytest.raises(
        TrainingError, match=r"(?s)All checkpoints in.*checkpoint-2/.*checkpoint-1/.*copy"
    ):
        read_newest(tmp_path)


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    assert read_newest(tmp_path) is None


# --- Several processes ---------------------------------------------------------


def in_threads(number: int, work) -> list:
    """Return each process's result; threads stand in for processes, and a barrier for gloo."""
    barrier, items = threading.Barrier(number), [None] * number

    def as_peer(rank: int):
        def exchange(item):
            items[rank] = item
            barrier.wait()
            everything = list(items)
            barrier.wait()
            return everything

        try:
            return work(ProcessGroup(rank=rank, number=number, exchange=exchange))
        except TrainingError as error:
            return error

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(as_peer, range(number)))


def test_each_process_writes_its_own_files_and_one_manifest_vouches_for_all(tmp_path):
    folder = tmp_path / "checkpoint-1"

    def write(peers: ProcessGroup) -> None:
        groups = {f"optimizer-{peers.rank}": {f"{peers.rank}": tensor(peers.rank)}}
        documents = {STATE: "{}"} if peers.is_main else {}
        save_checkpoint(folder, Part(groups=groups, documents=documents), peers=peers)

    in_threads(3, write)
    checkpoints = in_threads(2, lambda peers: read_checkpoint(folder, peers))
    for checkpoint in checkpoints:
        assert {k: v.item() for k, v in checkpoint.tensors("optimizer").items()} == {
            "0": 0,
            "1": 1,
            "2": 2,
        }
    (folder / "optimizer-2.safetensors").write_bytes(b"")
    for error in in_threads(2, lambda peers: read_checkpoint(folder, peers)):
        assert "optimizer-2.safetensors' has changed" in str(error)


def test_each_disk_verifies_all_files_of_its_own_copy(tmp_path):
    folders = [tmp_path / str(disk) / "checkpoint-1" for disk in range(2)]
    for number, name in enumerate(("config.json", "critic.safetensors", STATE)):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            save(folder.parent, 1)
        damaged = folders[number % 2] / name
        damaged.write_bytes(b"")
        for error in in_threads(2, lambda peers: read_checkpoint(folders[peers.rank], peers)):
            assert f"'{damaged}' has changed" in str(error)


def test_where_one_process_cannot_write_all_processes_fail(tmp_path):
    def write(peers: ProcessGroup) -> None:
        def fill_up(folder: Path) -> None:
            if peers.rank == 1:
                raise OSError(errno.ENOSPC, "No space left on device")

        documents = {STATE: "{}"} if peers.is_main else {}
        part = Part(documents=documents, write_policy=fill_up)
        save_checkpoint(tmp_path / "checkpoint-2", part, peers=peers)

    save(tmp_path, 1)
    first, second = in_threads(2, write)
    assert "Process 1 failed: [Errno 28] No space left" in str(first)
    assert "Free some space" in str(second)
    assert names(tmp_path) == ["checkpoint-1"]


# --- The optimizer -------------------------------------------------------------


def through_json(state):
    return json.loads(json.dumps(state))


def test_the_options_of_an_optimizer_are_restored():
    saved = optimizer_of((2, 3), (4,))
    saved.param_groups[0] |= {"lr": 0.1 / 3, "initial_lr": 0.1, "betas": (0.8, 0.9)}
    fresh = optimizer_of((2, 3), (4,), steps=0)
    restore_options(fresh, through_json(optimizer_options(saved)))
    assert optimizer_options(fresh) == optimizer_options(saved)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (two_groups(), "it has 1 parameter groups, but this run has 2"),
        (
            optimizer_of((2, 3), (4,), kind=torch.optim.SGD, steps=0),
            "belongs to AdamW, but this run uses SGD",
        ),
    ],
    ids=["count", "kind"],
)
def test_another_optimizer_is_refused(other, words):
    with pytest.raises(TrainingError, match=words):
        check_optimizer_fits(other, optimizer_options(optimizer_of((2, 3), (4,))))


def test_a_schedule_is_set_to_a_step():
    schedules = []
    for _ in range(2):
        optimizer = optimizer_of((3,), steps=0)
        schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    stepped, set_there = schedules
    for _ in range(4):
        stepped.optimizer.step(), stepped.step()
    set_there.optimizer.step()
    set_schedule_step(set_there, 4)
    assert set_there.get_last_lr() == stepped.get_last_lr() == [pytest.approx(0.1 / 5)]
    stepped.step(), set_there.step()
    assert set_there.get_last_lr() == stepped.get_last_lr() == [pytest.approx(0.1 / 6)]


def sequence(optimizer):
    """Constant steps before milestones, as a schedule within a schedule."""
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.1, 3),
        lr_scheduler.MultiStepLR(optimizer, [2, 4, 9], 0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


SCHEDULES = {
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 6, 6, 8], 0.5),
    "sequence": sequence,
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, 20),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9),
    "factors": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_any_kind_goes_on_from_its_state_in_a_checkpoint(name):
    def begin():
        optimizer = optimizer_of((3,), steps=0)
        return optimizer, SCHEDULES[name](optimizer)

    def rates(optimizer, schedule, steps):
        passed = []
        for _ in range(steps):
            optimizer.step(), schedule.step()
            passed.append(optimizer.param_groups[0]["lr"])
        return passed

    (optimizer, schedule), (again, resumed) = begin(), begin()
    rates(optimizer, schedule, 4)
    saved = json.loads(json.dumps([optimizer_options(optimizer), schedule.state_dict()]))
    restore_options(again, saved[0])
    restore_schedule(resumed, saved[1])
    assert rates(again, resumed, 9) == rates(optimizer, schedule, 9)


# --- Randomness ----------------------------------------------------------------


def test_generators_continue_where_they_were():
    saved = {"sampling": torch.Generator().manual_seed(1), "order": torch.Generator()}
    torch.rand(5, generator=saved["sampling"])
    tensors = generator_tensors(saved)
    expected = {name: torch.rand(3, generator=generator) for name, generator in saved.items()}
    fresh = {"sampling": torch.Generator().manual_seed(9), "order": torch.Generator()}
    restore_generators(fresh, tensors)
    for name, generator in fresh.items():
        assert torch.equal(torch.rand(3, generator=generator), expected[name])


def test_other_generators_are_refused():
    tensors = generator_tensors({"sampling": torch.Generator()})
    with pytest.raises(
        TrainingError,
        match=r"of the checkpoint, \['sampling'\], do not fit those of this run, \['order'\]",
    ):
        restore_generators({"order": torch.Generator()}, tensors)


def test_the_global_generators_continue_where_they_were():
    def draw():
        return [random.gauss(0, 1), *np.random.randn(3), *torch.randn(3).tolist()]

    # An odd number of normal draws leaves a cached one in Python's and NumPy's generators.
    draw()
    tensors, state = global_rng_state()
    expected = draw()
    draw()
    restore_global_rng_state(tensors, through_json(state))
    assert draw() == expected
