"""One process or several, whole or sharded: the same gradients, and steps skipped together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from ppo_core.engine import Engine
from ppo_core.engine_deepspeed import fill_settings
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.models import ActorCritic, Critic, LanguageModel
from ppo_core.rollout import SamplingSettings, sample_responses
from tests.test_models import make_rollout
from tests.tiny import EOS, make_policy

ROLLOUT = make_rollout((3, 7, 1, 2, 6, 4, 5, 2), (5, 1, 3, 5, 2, 4, 1, 1))
MICROBATCH_SIZES = (1, 4, 2)
MAX_GRAD_NORM = 1.0


class Run:
    """A policy and a critic that learn from the same rollout in every engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        critic = Critic.from_policy(make_policy(seed=5))
        torch.manual_seed(1)
        nn.init.normal_(critic.head.weight, std=0.1)
        self.policy = LanguageModel(make_policy())
        module = ActorCritic(self.policy, critic)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        self.module, self.optimizer = engine.prepare(module, optimizer)

    def accumulate(self, microbatch_size: int, *, factor: float = 1.0) -> None:
        """Gradients of the mean over all tokens; `factor` spoils the first process's."""
        own = torch.arange(len(ROLLOUT))[self.engine.rank :: self.engine.num_processes]
        batches = own.split(microbatch_size)
        for number, rows in enumerate(batches):
            with self.engine.accumulate_only(self.module, number < len(batches) - 1):
                predicted = self.module(ROLLOUT.token_rows(rows), 0.7)
                loss = (
                    predicted.values**2 - predicted.logprobs
                ).sum() / ROLLOUT.response_mask.sum()
                self.engine.backward(loss * factor if self.engine.rank == 0 else loss)

    def step(self) -> Tensor:
        return self.engine.step(self.module, self.optimizer, MAX_GRAD_NORM)

    def learn(self, *, disturbed: bool = False) -> list[float]:
        """Three steps of different numbers of microbatches; returns the gradient norms."""
        norms = []
        for size in MICROBATCH_SIZES:
            if disturbed:
                self.accumulate(size, factor=torch.nan)
                assert not self.step().isfinite()
                self.accumulate(size)
                self.engine.discard(self.module, self.optimizer)
                self.sample()
            self.accumulate(size)
            norms.append(self.step().item())
            self.schedule.step()
        return norms

    def sample(self) -> None:
        """Sample inside `gathered`, in each process more tokens than in the one before."""
        most = 2 + 3 * self.engine.rank
        settings = SamplingSettings(stop_token_id=EOS, temperature=1.0)
        uniforms = torch.full((2, most), 0.4)
        with self.engine.gathered(self.module), self.engine.autocast():
            self.sampled = sample_responses(
                self.policy, [[5, 6], [7]], uniforms, settings, batch_size=2
            )
            assert self.policy.model.lm_head.weight.shape == (61, 32)


def learn_in_a_process(folder: str, deepspeed: str | None, *, gather: bool = True) -> None:
    """What each process of a job does; the main one leaves weights and norms in the folder."""
    torch.set_num_threads(1)
    engine = Engine(deepspeed=deepspeed, gather_for_generation=gather)
    run = Run(engine)
    norms = run.learn(disturbed=gather)
    if sharded := engine.is_deepspeed and run.module.zero_optimization_stage() == 3:
        assert run.policy.model.lm_head.weight.numel() == 0
    assert engine.passes_meet() == (sharded and not gather)
    assert engine.any(engine.rank == engine.num_processes - 1)
    assert not engine.any(False)
    ranks = list(range(engine.num_processes))
    assert engine.gather_objects([str(engine.rank)]) == [str(rank) for rank in ranks]
    assert engine.sum(torch.tensor(engine.rank + 1)) == sum(ranks) + len(ranks)
    weights = engine.whole_state_dict(run.module)
    policy_weights = engine.whole_state_dict(run.policy)
    assert (weights is None) == (policy_weights is None) == (not engine.is_main)
    if weights is not None and policy_weights is not None:
        assert all(torch.equal(weights[f"policy.{n}"], w) for n, w in policy_weights.items())
        save_file(weights, f"{folder}/weights.safetensors")
        Path(folder, "norms.json").write_text(json.dumps(norms))
    engine.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_job(
    folder: Path, launcher: list[str], arguments: str = "None"
) -> subprocess.CompletedProcess:
    script = folder / "job.py"
    script.write_text(
        "from tests.test_engine import learn_in_a_process\n"
        f"learn_in_a_process({str(folder)!r}, {arguments})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def check_against_one_process(folder: Path, job: subprocess.CompletedProcess) -> None:
    assert job.returncode == 0, job.stderr[-3000:]
    one = Run(Engine())
    norms = one.learn()
    assert min(norms) > MAX_GRAD_NORM, "clipping is not tested"
    assert json.loads((folder / "norms.json").read_text()) == pytest.approx(norms, rel=1e-5)
    weights = load_file(folder / "weights.safetensors")
    assert weights.keys() == one.module.state_dict().keys()
    for name, weight in one.module.state_dict().items():
        assert_close(weights[name], weight, rtol=0, atol=1e-5, msg=name)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def write_settings(folder: Path, stage: int) -> str:
    """DeepSpeed's settings, as files for transformers' Trainer have them."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
    settings = {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    return str(path)


def test_two_processes_learn_what_one_learns_and_skip_together(tmp_path):
    check_against_one_process(tmp_path, run_job(tmp_path, TORCHRUN))


def test_zero_2_learns_what_one_process_learns_as_accelerate_launches_it(tmp_path):
    launcher = (
        "-m accelerate.commands.launch --use_deepspeed --zero_stage 2 --num_processes 2 "
        "--num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    ).split()
    check_against_one_process(tmp_path, run_job(tmp_path, launcher))


def test_zero_3_learns_what_one_process_learns_and_samples_different_lengths(tmp_path):
    settings = write_settings(tmp_path, stage=3)
    check_against_one_process(tmp_path, run_job(tmp_path, TORCHRUN, repr(settings)))


def test_zero_3_works_without_a_launcher_and_without_gathering(tmp_path):
    settings = write_settings(tmp_path, stage=3)
    job = run_job(tmp_path, [], f"{settings!r}, gather=False")
    check_against_one_process(tmp_path, job)


def test_one_process_gets_the_same_objects_back():
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine()
    assert engine.prepare(module, optimizer) == (module, optimizer)
    assert engine.unwrap(module) is module
    assert engine.prepare_frozen(module) is module
    assert not module.training
    assert not engine.is_deepspeed


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_as_they_are(spoiled):
    engine, module = Engine(), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    engine.backward(module(torch.ones(1, 2)).sum())
    assert engine.step(module, optimizer, 1.0) == pytest.approx(3**0.5)
    before = {name: w.clone() for name, w in module.state_dict().items()}
    moment = optimizer.state[module.weight]["exp_avg"].clone()
    engine.backward(module(torch.ones(1, 2)).sum() * spoiled)
    assert not engine.step(module, optimizer, 1.0).isfinite()
    assert all(torch.equal(before[name], w) for name, w in module.state_dict().items())
    assert torch.equal(moment, optimizer.state[module.weight]["exp_avg"])
    assert module.weight.grad is None


def test_bf16_computes_in_bfloat16_and_keeps_the_weights_in_fp32():
    engine = Engine(bf16=True)
    run = Run(engine)
    seen = []
    run.policy.model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    run.learn()
    with engine.autocast():
        run.policy.model(torch.tensor([[3, 4]]))
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in run.module.parameters()} == {torch.float32}
    plain = Run(Engine())
    plain.policy.model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    plain.accumulate(8)
    assert seen[-1] == torch.float32


def test_a_whole_state_dict_is_a_copy_in_which_tied_weights_stay_tied():
    model = make_policy("gpt2")
    weights = Engine().whole_state_dict(model)
    embeddings = weights["transformer.wte.weight"]
    assert weights["lm_head.weight"] is embeddings
    assert embeddings.data_ptr() != model.transformer.wte.weight.data_ptr()
    assert weights.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": {"enabled": True}}, r"fp16.enabled=True in 'zero.json' .* bf16=True"),
        ({"bf16": {"enabled": True}}, "bf16.enabled=True"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer=.* set learning_rate"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler=.* set lr_scheduler_type"),
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5 .* max_grad_norm"),
        ({"train_batch_size": 64}, "train_batch_size=64 .* per_device_train_batch_size"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu=4"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
    ],
)
def test_deepspeed_settings_that_are_the_trainers_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        fill_settings(settings, "'zero.json'")


def test_automatic_deepspeed_settings_are_filled():
    settings = {
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    fill_settings(settings, "'zero.json'")
    assert settings == {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "gradient_clipping": 0.0,
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "Expecting property name"), ("[]", "not a JSON object")],
)
def test_a_deepspeed_file_that_cannot_be_read_is_refused(tmp_path, content, message):
    path = tmp_path / "zero.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Engine(deepspeed=str(path))


def test_half_precision_of_the_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="mixed_precision=fp16 of accelerate launch"):
        Engine()


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch):
    Engine()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="each would train alone"):
        Engine()
