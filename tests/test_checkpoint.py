"""Checkpoints: exact to the bit, whole or not there, and never trusted unverified."""

import errno
import json
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, tensor
from transformers import AutoModelForCausalLM

from ppo_core.checkpoint import (
    latest_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from ppo_core.errors import TrainingError
from ppo_core.training_state import (
    flatten_optimizer,
    generator_tensors,
    global_rng_state,
    restore_generators,
    restore_global_rng_state,
    restore_optimizer,
)
from tests.tiny import VOCABULARY, make_policy

ROOT = Path(__file__).parent.parent


def write_nothing(folder: Path) -> None:
    pass


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def save(output_dir: Path, step: int, *, value: float = 0.0, write_policy=write_config) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    save_checkpoint(
        folder,
        tensors={"critic": {"weight": torch.full((3,), value)}, "ema": {}},
        state={"episodes": 8 * step},
        write_policy=write_policy,
    )
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


# --- What goes in comes out ----------------------------------------------------


class Run:
    """A training whose every source of state is there: weights, moments, data order, dropout."""

    def __init__(self):
        self.model = make_policy("gpt2").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.order = torch.Generator().manual_seed(3)

    def train(self, steps):
        for _ in range(steps):
            ids = torch.randint(VOCABULARY, (2, 8), generator=self.order)
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder):
        moments, groups = flatten_optimizer(self.optimizer)
        rng, rng_state = global_rng_state()
        save_checkpoint(
            folder,
            tensors={
                "optimizer": moments,
                "generators": generator_tensors({"order": self.order}),
                "rng": rng,
            },
            state={"optimizer": groups, "rng": rng_state},
            write_policy=self.model.save_pretrained,
        )

    def load(self, folder):
        checkpoint = read_checkpoint(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5, fused=True)
        restore_optimizer(
            self.optimizer, checkpoint.tensors["optimizer"], checkpoint.state["optimizer"]
        )
        restore_generators({"order": self.order}, checkpoint.tensors["generators"])
        restore_global_rng_state(checkpoint.tensors["rng"], checkpoint.state["rng"])


def test_a_resumed_run_ends_in_the_same_weights_to_the_bit(tmp_path):
    straight = Run()
    torch.manual_seed(5)
    straight.train(10)

    stopped = Run()
    torch.manual_seed(5)
    stopped.train(5)
    stopped.save(tmp_path / "checkpoint-5")
    torch.rand(7)
    resumed = Run()
    resumed.load(tmp_path / "checkpoint-5")
    resumed.train(5)

    resumed_weights = resumed.model.state_dict()
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed_weights[name]), name


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
def test_every_kind_of_tensor_comes_back_to_the_bit(tmp_path, value):
    folder = tmp_path / "checkpoint-1"
    save_checkpoint(folder, tensors={"g": {"x": value}}, state={}, write_policy=write_nothing)
    read = read_checkpoint(folder).tensors["g"]["x"]
    assert read.dtype == value.dtype and read.shape == value.shape
    flat, expected = (t.contiguous().view(-1).view(torch.uint8) for t in (read, value))
    assert torch.equal(flat, expected)


def test_tied_weights_come_back_under_both_names(tmp_path):
    weight, folder = torch.randn(3), tmp_path / "checkpoint-1"
    save_checkpoint(
        folder,
        tensors={"critic": {"a": weight, "b": weight, "part": weight[1:]}},
        state={},
        write_policy=write_nothing,
    )
    read = read_checkpoint(folder).tensors["critic"]
    assert torch.equal(read["a"], weight) and torch.equal(read["b"], weight)
    assert torch.equal(read["part"], weight[1:])


def test_step_and_plain_state_come_back(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, 12, value=3.0))
    assert checkpoint.step == 12
    assert checkpoint.state == {"episodes": 96}
    assert checkpoint.tensors["critic"]["weight"].tolist() == [3.0] * 3
    assert checkpoint.tensors["ema"] == {}


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path):
    run = Run()
    run.train(1)
    run.save(tmp_path / "checkpoint-1")
    assert {path.suffix for path in (tmp_path / "checkpoint-1").iterdir()} == {
        ".json",
        ".safetensors",
    }


# --- Whole, or not there -------------------------------------------------------


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


KILLED_HALF_WAY = """
import sys, torch
from pathlib import Path
from ppo_core.checkpoint import save_checkpoint

def save(step, write_policy):
    large = {str(i): torch.full((1 << 20,), float(step)) for i in range(4)}
    folder = Path(sys.argv[1]) / f"checkpoint-{step}"
    save_checkpoint(folder, tensors={"critic": large}, state={}, write_policy=write_policy)

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

    assert names(tmp_path) == [".checkpoint-2.partial", "checkpoint-1"]
    checkpoint = read_checkpoint(latest_checkpoint(tmp_path))
    assert checkpoint.step == 1
    assert all((value == 1).all() for value in checkpoint.tensors["critic"].values())
    remove_old_checkpoints(tmp_path, None)
    assert names(tmp_path) == ["checkpoint-1"]


KILLED_AT_EVERY_OPERATION = """
import os, signal, sys, torch
from itertools import count
from pathlib import Path
from ppo_core.checkpoint import latest_checkpoint, read_checkpoint, save_checkpoint

output_dir = Path(sys.argv[1])

def save(turn):
    save_checkpoint(
        output_dir / "checkpoint-7",
        tensors={"critic": {"weight": torch.tensor(turn)}},
        state={"turn": turn},
        write_policy=lambda folder: (folder / "config.json").write_text("{}"),
    )

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
    checkpoint = read_checkpoint(latest_checkpoint(output_dir))
    assert checkpoint.tensors["critic"]["weight"] == checkpoint.state["turn"]
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


def test_a_checkpoint_that_outgrows_the_disk_leaves_the_earlier_ones(tmp_path):
    save(tmp_path, 1, value=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(TrainingError, match=r"step 2 could not be written.*too large.*Free"):
            save_checkpoint(
                tmp_path / "checkpoint-2",
                tensors={"critic": {"weight": torch.zeros(1 << 16)}},
                state={},
                write_policy=write_nothing,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["checkpoint-1"]
    assert read_checkpoint(latest_checkpoint(tmp_path)).step == 1


def test_a_disk_that_fills_up_while_a_step_is_replaced_leaves_the_earlier_one(tmp_path):
    def fill_up(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save(tmp_path, 1, value=1.0)
    with pytest.raises(TrainingError, match="No space left on device"):
        save(tmp_path, 1, value=2.0, write_policy=fill_up)
    assert names(tmp_path) == ["checkpoint-1"]
    checkpoint = read_checkpoint(tmp_path / "checkpoint-1")
    assert checkpoint.tensors["critic"]["weight"].tolist() == [1.0] * 3


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
    assert checkpoint.tensors["critic"]["weight"].tolist() == [2.0] * 3


def test_a_run_killed_between_the_two_renames_still_has_the_earlier_one(tmp_path):
    save(tmp_path, 9)
    save(tmp_path, 10, value=1.0).rename(tmp_path / "checkpoint-10.old")
    latest = latest_checkpoint(tmp_path)
    assert latest == tmp_path / "checkpoint-10.old"
    assert read_checkpoint(latest).step == 10
    save(tmp_path, 10, value=2.0)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9"]


def test_a_replaced_checkpoint_that_was_not_removed_yet_is_never_read_again(tmp_path):
    shutil.copytree(save(tmp_path, 10), tmp_path / "checkpoint-10.old")
    save(tmp_path, 9).rename(tmp_path / "checkpoint-9.old")
    (tmp_path / "checkpoint-best.old").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    remove_old_checkpoints(tmp_path, None)
    # That of step 9 is the only one of its step.
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9.old", "checkpoint-best.old"]


def test_a_group_named_like_the_policys_file_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"model\.safetensors.*another name"):
        save_checkpoint(
            tmp_path / "checkpoint-1",
            tensors={"model": {}},
            state={},
            write_policy=lambda folder: (folder / "model.safetensors").touch(),
        )
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["final", "checkpoint-", "checkpoint-3.old"])
def test_a_folder_that_would_not_be_found_again_is_refused(tmp_path, name):
    with pytest.raises(TrainingError, match="checkpoint-<step>"):
        save_checkpoint(tmp_path / name, tensors={}, state={}, write_policy=write_nothing)


# --- Finding and removing ------------------------------------------------------


def test_the_latest_is_the_highest_number_not_the_last_name(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_an_unfinished_folder_is_passed_over(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-final").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "not there") is None


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(1, [10]), (2, [9, 10]), (3, [2, 9, 10]), (5, [2, 9, 10]), (None, [2, 9, 10])],
)
def test_the_oldest_checkpoints_go_first(tmp_path, keep, kept):
    for step in (10, 2, 9):
        save(tmp_path, step)
    (tmp_path / "checkpoint-1").mkdir()
    remove_old_checkpoints(tmp_path, keep)
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in [1, *kept])


# --- The optimizer -------------------------------------------------------------


def through_json(state):
    return json.loads(json.dumps(state))


def test_the_optimizer_comes_back_with_its_options(tmp_path):
    saved = optimizer_of((2, 3), (4,), steps=3)
    saved.param_groups[0] |= {"lr": 0.1 / 3, "initial_lr": 0.1}
    tensors, state = flatten_optimizer(saved)
    fresh = optimizer_of((2, 3), (4,), steps=0)
    restore_optimizer(fresh, tensors, through_json(state))
    expected, actual = saved.state_dict(), fresh.state_dict()
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for number, named in expected["state"].items():
        assert named.keys() == actual["state"][number].keys()
        for name, value in named.items():
            assert torch.equal(value, actual["state"][number][name])
            assert value is not actual["state"][number][name]


def test_moments_finer_than_their_parameters_keep_their_bits():
    saved = optimizer_of((3,), dtype=torch.bfloat16)
    (parameter,) = saved.param_groups[0]["params"]
    fine = tensor([0.1, 0.2, 0.3])
    saved.state[parameter]["exp_avg"] = fine
    fresh = optimizer_of((3,), dtype=torch.bfloat16, steps=0)
    restore_optimizer(fresh, *flatten_optimizer(saved))
    (named,) = fresh.state.values()
    assert named["exp_avg"].dtype == torch.float32 and torch.equal(named["exp_avg"], fine)
    assert named["exp_avg_sq"].dtype == torch.bfloat16


def test_numbers_that_are_no_tensors_come_back_too():
    saved = optimizer_of((3,))
    (parameter,) = saved.param_groups[0]["params"]
    saved.state[parameter]["scale"] = 0.1
    tensors, state = flatten_optimizer(saved)
    fresh = optimizer_of((3,), steps=0)
    restore_optimizer(fresh, tensors, through_json(state))
    (named,) = fresh.state.values()
    assert named["scale"] == 0.1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (optimizer_of((2, 3), (5,), steps=0), r"parameter 1 has the shape \[4\] there and \[5\]"),
        (optimizer_of((2, 3), steps=0), r"groups have \[2\] parameters, here they have \[1\]"),
        (optimizer_of((2, 3), (4,), kind=torch.optim.SGD, steps=0), "of AdamW, here is SGD"),
    ],
    ids=["shape", "count", "kind"],
)
def test_state_of_another_optimizer_is_refused(other, words):
    tensors, state = flatten_optimizer(optimizer_of((2, 3), (4,)))
    with pytest.raises(TrainingError, match=words):
        restore_optimizer(other, tensors, state)
    assert not other.state


def test_lost_moments_are_not_started_afresh():
    tensors, state = flatten_optimizer(optimizer_of((2, 3), (4,)))
    del tensors["1.exp_avg"]
    with pytest.raises(TrainingError, match=r"1\.exp_avg is missing"):
        restore_optimizer(optimizer_of((2, 3), (4,), steps=0), tensors, state)


# --- Randomness ----------------------------------------------------------------


def test_generators_go_on_where_they_were():
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
    with pytest.raises(TrainingError, match=r"\['sampling'\], are not those.*\['order'\]"):
        restore_generators({"order": torch.Generator()}, tensors)


def test_the_global_generators_go_on_where_they_were():
    def draw():
        return [random.gauss(0, 1), *np.random.randn(3), *torch.randn(3).tolist()]

    # An odd number of normal draws leaves one in store in Python's and NumPy's generators.
    draw()
    tensors, state = global_rng_state()
    expected = draw()
    draw()
    restore_global_rng_state(tensors, through_json(state))
    assert draw() == expected
