"""Two processes, sharded or not: the same losses, weights, moments and samples as in one."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from ppo_core.distributed.choose_engine import choose_engine
from ppo_core.distributed.choose_sharding import choose_sharding
from ppo_core.distributed.deepspeed_engine import DeepSpeedEngine
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.fsdp_engine import FSDPEngine
from ppo_core.errors import ConfigError, RunInterruptedError
from ppo_core.models import lm_head
from ppo_core.models.critic import ActorCritic, Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.logprobs_and_values import critic_values, response_logprobs
from ppo_core.rollout.sample_responses import SamplingCallbacks, sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings
from tests.helpers.models.rollouts import make_rollout
from tests.helpers.models.tiny import EOS, VOCABULARY, make_policy
from tests.helpers.paths import ROOT
from tests.helpers.runs.forked_python import run_python

# The first process has the long responses, the other the short ones.
ROLLOUT = make_rollout((3, 7, 1, 2, 6, 4, 5, 2), (9, 1, 8, 1, 9, 2, 7, 1))
MICROBATCH_SIZES = (1, 4, 2)
MAX_GRAD_NORM = 1.0
SAMPLING = SamplingSettings(stop_token_id=EOS, temperature=1.0)
PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 4]]
UNIFORMS = torch.rand(4, 12, generator=torch.Generator().manual_seed(3))


class Run:
    """Trains a policy and a critic, with the exact KL from a reference in the loss."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        critic = Critic.from_policy(make_policy(seed=5))
        torch.manual_seed(1)
        nn.init.normal_(critic.head.weight, std=0.1)
        self.critic = critic
        self.policy = LanguageModel(make_policy())
        self.reference = LanguageModel(make_policy(seed=2))
        module = ActorCritic(self.policy, critic)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        engine.prepare_frozen(self.reference)
        self.module, self.optimizer = engine.prepare(module, optimizer)

    def add_gradients(
        self, microbatch_size: int, *, factor: float = 1.0, unfinished: bool = False
    ) -> float:
        """Add the gradients of the mean loss over all tokens; return that mean.

        `factor` spoils the gradient of the first process; `unfinished` expects more to come.
        """
        batches = torch.tensor(self.engine.share(len(ROLLOUT))).split(microbatch_size)
        total = torch.zeros(())
        for number, rows in enumerate(batches):
            more = unfinished or number < len(batches) - 1
            with self.engine.accumulate_only(self.module, more):
                predicted, values = self.module(
                    ROLLOUT.token_rows(rows), 0.7, lambda logprobs, _: -logprobs, self.reference
                )
                others = values**2 + 0.1 * predicted.full_kl
                loss = (predicted.loss + others.sum()) / ROLLOUT.response_mask.sum()
                self.engine.backward(loss * factor if self.engine.rank == 0 else loss)
                total += loss.detach()
        return self.engine.sum(total).item()

    def step(self, microbatch_size: int, *, factor: float = 1.0) -> tuple[float, float]:
        """Step on all tokens; return the loss and the norm of its gradient."""
        loss = self.add_gradients(microbatch_size, factor=factor)
        return loss, self.engine.step(self.module, self.optimizer, MAX_GRAD_NORM).item()

    def learn(self, *, disturbed: bool = False) -> list[tuple[float, float]]:
        """Take three steps with different numbers of microbatches."""
        found = []
        for size in MICROBATCH_SIZES:
            if disturbed:
                self.disturb(size)
            found.append(self.step(size))
            self.schedule.step()
        return found

    def disturb(self, microbatch_size: int) -> None:
        """Check that a NaN gradient, a dropped step and an aborted rollout change nothing."""
        before = in_every_process(self.engine.full_state_dict(self.module))
        assert not math.isfinite(self.step(microbatch_size, factor=math.nan)[1])
        for unfinished in (True, False):
            self.add_gradients(microbatch_size, unfinished=unfinished)
            self.engine.discard(self.module, self.optimizer)
        with pytest.raises(RunInterruptedError), self.engine.gathered(self.module):
            raise RunInterruptedError("SIGTERM")
        assert_same(in_every_process(self.engine.full_state_dict(self.module)), before)

    def say(self) -> dict[str, Tensor]:
        """Return samples, the reference's log-probabilities and values of the full batch."""
        engine, share = self.engine, self.engine.share(len(PROMPTS))
        with engine.gathered(self.module):
            sampled = sample_responses(
                self.policy,
                [PROMPTS[n] for n in share],
                UNIFORMS[share],
                SAMPLING,
                batch_size=1,
                callbacks=SamplingCallbacks(
                    any_active=engine.any if engine.requires_equal_passes() else None
                ),
            )
            values = critic_values(self.critic, sampled, 2)
        with engine.gathered(self.reference):
            logprobs = response_logprobs(self.reference, sampled, 2)
        said = {"ids": sampled.response_ids, "reference": logprobs, "values": values}
        return {name: engine.gather_rows(t, len(PROMPTS)) for name, t in said.items()}

    def states(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": tensor.clone()
            for name, tensors in self.engine.optimizer_states(self.module, self.optimizer)
            for key, tensor in tensors.items()
        }

    def go_back(self, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        self.engine.load_weights(self.module, weights.get)
        self.engine.load_optimizer_states(
            self.module,
            self.optimizer,
            lambda name: {
                key.partition("/")[2]: tensor
                for key, tensor in states.items()
                if key.partition("/")[0] == name
            },
        )


def run_in_a_process(folder: str, settings: dict[str, Any], expected: str | None = None) -> None:
    """Run one process of a job; the main process saves its results in the folder."""
    torch.set_num_threads(1)
    lm_head.LOGITS_PER_CHUNK = 3 * VOCABULARY  # several chunks, more in the first process
    engine = choose_engine(**settings)
    assert engine.sharding == (expected or settings["sharding"])
    kinds = {"fsdp2": FSDPEngine, "ddp": Engine, "none": Engine}
    assert type(engine) is kinds.get(engine.sharding, DeepSpeedEngine)
    check_sums(engine)
    shard_wise = not settings.get("gather_for_generation", True)
    assert engine.requires_equal_passes() == (engine.shards_weights and shard_wise)
    run = Run(engine)
    learned = run.learn(disturbed=True)
    said, states = run.say(), run.states()
    weights = in_every_process(engine.full_state_dict(run.module))
    reference, policy = (engine.full_state_dict(part) for part in (run.reference, run.policy))
    if engine.shards_weights and engine.num_processes > 1:
        assert sum(size_here(p) for p in run.module.parameters()) < 0.6 * sum(
            weight.numel() for weight in weights.values()
        )
    # The same step twice from the same weights and moments.
    again = []
    for _ in range(2):
        found = run.step(2)
        again.append((found, in_every_process(engine.full_state_dict(run.module)), run.states()))
        run.go_back(weights, states)
        assert_same(run.states(), states)
        assert_same(in_every_process(engine.full_state_dict(run.module)), weights)
    assert again[0][0] == again[1][0]
    assert_same(again[0][1], again[1][1])
    assert_same(again[0][2], again[1][2])
    assert not torch.equal(again[0][1]["critic.head.weight"], weights["critic.head.weight"])
    # A reference that follows the policy.
    engine.copy_weights(run.policy, run.reference)
    followed = engine.full_state_dict(run.reference)
    if engine.is_main:
        assert_same(followed, {name: weights[f"policy.{name}"] for name in followed})
        assert_same(followed, policy)
        save_file(weights, f"{folder}/weights.safetensors")
        save_file(states, f"{folder}/states.safetensors")
        save_file(said, f"{folder}/said.safetensors")
        save_file(reference, f"{folder}/reference.safetensors")
        Path(folder, "learned.json").write_text(json.dumps(learned))
    engine.accelerator.wait_for_everyone()


def check_sums(engine: Engine) -> None:
    ranks = list(range(engine.num_processes))
    assert engine.any(engine.rank == ranks[-1])
    assert not engine.any(False)
    assert engine.gather_objects([str(engine.rank)]) == [str(rank) for rank in ranks]
    assert engine.sum(torch.tensor(engine.rank + 1)) == sum(ranks) + len(ranks)


def in_every_process(tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
    handed = [tensors]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(handed)
    return handed[0]


def size_here(parameter: Any) -> int:
    """Return the number of elements of a parameter that this process holds."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is not None:
        return shard.numel()
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert equality bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def run_call(folder: Path, call: str, processes: int = 2) -> None:
    """Run the expression `<module>.<function>(...)` in one or more processes."""
    job = run_python(write_script(folder, call), processes=processes, seconds=280)
    assert job.returncode == 0, job.stderr[-6000:]


def write_script(folder: Path, call: str) -> Path:
    """Write a script that runs a call."""
    script = folder / "job.py"
    module = call.partition("(")[0].rpartition(".")[0]
    script.write_text(
        "from ppo_core.distributed.process import end_with_parent\n"
        "end_with_parent()\n"
        f"import {module}\n{call}\n"
    )
    return script


MODULE = "tests.ppo_core.distributed.test_choose_sharding"


@pytest.fixture(scope="module")
def one(request):
    """The results of one process."""
    kept = lm_head.LOGITS_PER_CHUNK
    lm_head.LOGITS_PER_CHUNK = 3 * VOCABULARY
    run = Run(choose_engine())
    found = run, run.learn(), run.states(), run.say()
    lm_head.LOGITS_PER_CHUNK = kept
    return found


def check_against_one_process(folder: Path, one) -> None:
    run, learned, states, said = one
    for (loss, norm), (there, norm_there) in zip(
        learned, json.loads((folder / "learned.json").read_text()), strict=True
    ):
        assert there == pytest.approx(loss, abs=1e-6)
        assert norm_there == pytest.approx(norm, rel=1e-5)
        assert norm > MAX_GRAD_NORM, "clipping is not tested"
    expected = {"weights": run.module.state_dict(), "states": states, "said": said}
    expected["reference"] = run.reference.state_dict()
    for file, tensors in expected.items():
        found = load_file(folder / f"{file}.safetensors")
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=f"{file} {name}")


SHARD_WISE = {"offload": True, "gather_for_generation": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"sharding": "ddp"},
        pytest.param({"sharding": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"sharding": "zero2"}, marks=pytest.mark.slow),
        pytest.param({"sharding": "zero2", "offload": True}, marks=pytest.mark.slow),
        pytest.param({"sharding": "zero3"}, marks=pytest.mark.slow),
        pytest.param({"sharding": "fsdp2", **SHARD_WISE}, marks=pytest.mark.slow),
        pytest.param({"sharding": "zero3", **SHARD_WISE}, marks=pytest.mark.slow),
        {"sharding": "fsdp2"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_two_processes_get_the_results_of_one(tmp_path, one, settings):
    run_call(tmp_path, f"{MODULE}.run_in_a_process({str(tmp_path)!r}, {settings!r})")
    check_against_one_process(tmp_path, one)


LAUNCHES = {
    name: f"--config_file infra/accelerate/{name}.yaml"
    for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
} | {
    "flags for zero2": "--use_deepspeed --zero_stage 2 --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no"
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_accelerate_launch_chooses_the_sharding(tmp_path, one, name):
    launcher = f"-m accelerate.commands.launch {LAUNCHES[name]} --main_process_port 0".split()
    call = f"{MODULE}.run_in_a_process({str(tmp_path)!r}, {{}}, expected={name.split()[-1]!r})"
    job = subprocess.run(
        [sys.executable, *launcher, write_script(tmp_path, call)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert job.returncode == 0, job.stderr[-6000:]
    check_against_one_process(tmp_path, one)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_deepspeed_settings_from_a_file(tmp_path, one, processes):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
    automatic = dict.fromkeys(
        (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        ),
        "auto",
    )
    path = tmp_path / "zero.json"
    path.write_text(
        json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}} | automatic)
    )
    settings = {"deepspeed": str(path), "gather_for_generation": processes > 1}
    call = f"{MODULE}.run_in_a_process({str(tmp_path)!r}, {settings!r}, expected='zero3')"
    run_call(tmp_path, call, processes)
    check_against_one_process(tmp_path, one)


# --- Settings and launchers ---

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
TWO = {"WORLD_SIZE": "2"}
ONE_FOR_TWO = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
"""What `accelerate launch --cpu --num_processes 2` sets in the only process that it starts."""


@pytest.mark.parametrize(
    ("environment", "given", "chosen"),
    [
        ({}, {}, "none"),
        (TWO, {}, "ddp"),
        (TWO, {"sharding": "fsdp2", "offload": True}, "fsdp2"),
        ({}, {"sharding": "zero3"}, "zero3"),
        (TWO | FSDP, {}, "fsdp2"),
        (TWO | DEEPSPEED, {}, None),
        ({}, {"deepspeed": "zero.json"}, None),
        (DEEPSPEED, {"sharding": "zero2"}, "zero2"),
    ],
)
def test_setting_and_launcher_choose_one_sharding(monkeypatch, environment, given, chosen):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert choose_sharding(**NOTHING | given) == chosen


def test_fsdp_of_version_1_is_run_as_version_2_with_one_log_line(monkeypatch, caplog):
    for name, value in (
        FSDP | {"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "full_shard"}
    ).items():
        monkeypatch.setenv(name, value)
    assert choose_sharding(**NOTHING) == "fsdp2"
    assert [record.getMessage() for record in caplog.records] == [
        "FSDP version 1 of accelerate launch is run as version 2."
    ]


NOTHING = {"sharding": None, "deepspeed": None, "offload": False}


@pytest.mark.parametrize(
    ("environment", "given", "message"),
    [
        (
            TWO,
            {"sharding": "none"},
            "sharding='none' is for one process, but 2 processes were launched",
        ),
        ({}, {"offload": True}, "offload=True has no effect with sharding='none'"),
        (
            TWO,
            {"sharding": "ddp", "offload": True},
            "offload=True has no effect with sharding='ddp'",
        ),
        (FSDP, {"sharding": "zero3"}, "sharding='zero3' and accelerate launch with FSDP"),
        (DEEPSPEED, {"sharding": "fsdp2"}, "sharding='fsdp2' and accelerate launch with DeepSpeed"),
        ({}, {"sharding": "ddp", "deepspeed": "zero.json"}, "and deepspeed='zero.json' contradict"),
        (
            {},
            {"offload": True, "deepspeed": "zero.json"},
            "offload=True does not work with deepspeed='zero.json'",
        ),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, {}, "STRATEGY=SHARD_GRAD_OP"),
        (ONE_FOR_TWO, {}, "started one process instead of several"),
        (FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"}, {}, "RESHARD_AFTER_FORWARD=false"),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "set gradient_checkpointing=True"),
        (FSDP | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, {}, "AUTO_WRAP_POLICY=NO_WRAP"),
    ],
)
def test_contradictions_are_refused_by_name(monkeypatch, environment, given, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        choose_sharding(**NOTHING | given)


def test_a_deepspeed_file_of_another_stage_is_refused(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(
        ConfigError, match=r"sharding='zero3' contradicts '.*zero.json', where the ZeRO stage is 2"
    ):
        choose_engine(sharding="zero3", deepspeed=str(path))
