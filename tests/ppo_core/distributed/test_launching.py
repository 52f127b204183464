"""Scripts that use accelerate before the trainer, and the files of `accelerate launch`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.runs.forked_python import run_python

SCRIPT = """
import torch
from accelerate import Accelerator, PartialState

FIRST

from ppo_core.distributed.choose_engine import choose_engine

engine = choose_engine()
assert engine.num_processes == 2, engine.num_processes
assert engine.sum(torch.tensor(1.0)).item() == 2
assert PartialState().num_processes == 2
assert engine.sharding == "SHARDING", engine.sharding
"""

LAUNCHES = {
    "ddp": {},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_RESHARD_AFTER_FORWARD": "full_shard",
    },
}
"""Sharding -> what `accelerate launch` sets for it; FSDP of version 1 runs as version 2."""


# With zero3 accelerate starts DeepSpeed, which compiles its collectives on a fresh machine.
@pytest.mark.parametrize(
    "sharding", ["ddp", pytest.param("zero3", marks=pytest.mark.slow), "fsdp2"]
)
def test_a_script_may_use_accelerate_before_the_trainer(sharding: str):
    first = "with PartialState().local_main_process_first(): pass"
    if sharding == "ddp":
        first = "Accelerator()"
    script = SCRIPT.replace("FIRST", first).replace("SHARDING", sharding)
    done = run_python("-c", script, processes=2, variables=LAUNCHES[sharding])
    assert done.codes == [0, 0], done.stderr[-3000:]


LOADED_IN_ONE = """
import os
import torch
from dataclasses import replace
from tests.ppo_core.training.test_trainer import CONFIG, make_policy, make_trainer

reference = make_policy(seed=int(os.environ["RANK"]))
make_trainer(replace(CONFIG, bf16=False), ref_model=reference)
"""


def test_models_that_differ_between_processes_are_refused():
    done = run_python("-c", LOADED_IN_ONE, processes=2)
    assert done.codes != [0, 0]
    assert "The reference has other weights in process 1 than in process 0" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--config_file", "infra/accelerate/ddp.yaml"], "2 ddp"),
        (["--config_file", "infra/accelerate/fsdp2.yaml"], "2 fsdp2"),
        (["--multi_gpu", "--num_processes", "2"], "2 ddp"),
        (["--cpu", "--num_processes", "2"], "started one process instead of several"),
    ],
)
def test_accelerate_launch_starts_as_many_processes_as_were_asked_for(
    tmp_path: Path, options: list[str], expected: str
):
    script = tmp_path / "script.py"
    script.write_text(
        "from ppo_core.distributed.choose_engine import choose_engine\n"
        "engine = choose_engine()\n"
        "print(engine.num_processes, engine.sharding)\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert expected in done.stdout + done.stderr
    assert (done.returncode == 0) == expected.startswith("2")
