"""Every phase on a GPU, mostly in bf16, against fp32 on the CPU: `make test-gpu`."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from ppo_core.training.answer_job import AnswerJob, write_answer_job
from tests.flows.whole_flow.test_flow_processes import start
from tests.flows.whole_flow.test_placement import PLACES, require_equal, run_places
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model, write_rows
from tests.helpers.models.tiny import make_policy
from tests.helpers.runs.forked_python import run_python
from tests.ppo_core.distributed.test_choose_sharding import run_call
from tests.ppo_core.distributed.test_sharded_training import call_of
from tests.ppo_core.models.test_adapters import save_classifier

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(900),
]

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment of a process that sees no GPU."""

LOSS = 2e-2
"""Largest difference of a loss in bf16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, and a policy that was trained until it is sure of its answers."""
    made = tmp_path_factory.mktemp("gpu")
    rng = Random(0)
    prompts = [f"w{rng.randrange(20)} w{rng.randrange(20)}" for _ in range(64)]
    write_model(made / "base")
    write_model(made / "rm", labels=1)
    write_rows(made / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    write_rows(
        made / "sft.jsonl", [{"prompt": one, "completion": one.split()[0]} for one in prompts]
    )
    write_rows(
        made / "reward.jsonl", [{"prompt": one, "chosen": one, "rejected": "w5"} for one in prompts]
    )
    supervised("sft", made, made / "trained", HIDDEN, "--num_epochs", 120, "--learning_rate", 3e-3)
    return made


def supervised(
    kind: str, folder: Path, output: Path, variables: dict[str, str], *flags: object
) -> dict[str, float]:
    """Train on the rows of the folder, and return the metrics."""
    given = ("--model_name_or_path", folder / "base", "--dataset_name", folder / f"{kind}.jsonl")
    sizes = ("--batch_size", 16, "--max_length", 32)
    words = ("-m", "ppo_core.supervised", kind, *given, *sizes, "--output_dir", output, *flags)
    ended = run_python(*words, variables=variables)
    assert not ended.returncode, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def ppo(folder: Path, output: Path, variables: dict[str, str], *flags: object) -> dict[str, Any]:
    """Run two updates of PPO on the trained policy, and return the metrics of the first."""
    ended = run_python(
        *("-m", "ppo_core", "--output_dir", output, "--dataset_name", folder / "prompts.jsonl"),
        *("--model_name_or_path", folder / "trained", "--sft_model_path", folder / "trained"),
        *("--reward_model_path", folder / "rm", "--reward_end_of_text", "false"),
        *("--total_episodes", 32, "--batch_size", 16, "--response_length", 6),
        *("--num_sample_generations", 0, "--learning_rate", 1e-3, *flags),
        variables=variables,
    )
    assert not ended.returncode, ended.stderr[-3000:]
    lines = read_metrics(output / METRICS_FILE)
    assert len(lines) == 2
    return lines[0]


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_the_loss_of_a_supervised_training_in_bf16(kind: str, folder: Path, tmp_path: Path):
    on_cpu = supervised(kind, folder, tmp_path / "cpu", HIDDEN, "--learning_rate", 1e-3)
    on_gpu = supervised(kind, folder, tmp_path / "gpu", {}, "--learning_rate", 1e-3, "--bf16")
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], abs=LOSS)


@pytest.mark.parametrize("flags", [("--sharding", "fsdp2"), ("--sharding", "zero3")])
def test_a_sharded_supervised_training_ends_as_on_the_cpu(
    flags: tuple[str, ...], folder: Path, tmp_path: Path
):
    on_cpu = supervised("sft", folder, tmp_path / "cpu", HIDDEN, "--learning_rate", 1e-3)
    on_gpu = supervised("sft", folder, tmp_path / "gpu", {}, "--learning_rate", 1e-3, *flags)
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], abs=1e-3)


def test_greedy_answers_in_bf16_are_those_of_fp32(folder: Path, tmp_path: Path):
    prompts = [json.loads(row)["prompt"] for row in (folder / "prompts.jsonl").open()]
    texts = {}
    for precision, variables in (("fp32", HIDDEN), ("bf16", {})):
        job = AnswerJob(
            policy=str(folder / "trained"),
            tokenizer=str(folder / "trained"),
            prompts=list(prompts),
            prompt_format="auto",
            response_length=6,
            temperature=0.0,
            seed=1,
            precision=precision,
        )
        file = tmp_path / precision / "job.json"
        file.parent.mkdir()
        write_answer_job(job, file)
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        ended = run_python("-m", "ppo_core.training.answer_job", file, variables=alone | variables)
        assert not ended.returncode, ended.stderr[-3000:]
        texts[precision] = json.loads((file.parent / "answers-0.json").read_text())["texts"]
    assert texts["bf16"] == texts["fp32"]
    assert len(set(texts["fp32"])) > 5


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each step that only reads models computed, and on which devices."""
    return run_places(tmp_path_factory.mktemp("places"), "cuda")


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_reads_models_computes_on_the_gpu_as_on_the_cpu(
    place: str, places: dict[str, Any]
):
    assert places[place]["cuda"][0] == ["cuda"]
    require_equal(places[place]["cpu"][1], places[place]["cuda"][1])


def test_the_losses_of_ppo_in_bf16(folder: Path, tmp_path: Path):
    on_cpu = ppo(folder, tmp_path / "cpu", HIDDEN)
    on_gpu = ppo(folder, tmp_path / "gpu", {}, "--bf16", "true")
    for name in ("loss/policy_avg", "loss/value_avg"):
        assert on_gpu[name] == pytest.approx(on_cpu[name], abs=LOSS), name


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_sharded_ppo_in_one_process_ends_as_unsharded(sharding: str, folder: Path, tmp_path: Path):
    start, weights = load_file(folder / "trained" / "model.safetensors"), {}
    for name, flags in (("none", ()), (sharding, ("--sharding", sharding))):
        ppo(folder, tmp_path / name, {}, "--bf16", "false", *flags)
        weights[name] = load_file(tmp_path / name / "model.safetensors")
    # Adam divides by the size of the gradient, which amplifies rounding of gradients near 0: single
    # weights may differ, their update as a whole may not.
    for name, weight in weights["none"].items():
        update = weight - start[name]
        assert (weights[sharding][name] - weight).norm() < 0.1 * update.norm(), name


@pytest.mark.parametrize("bits", ["4", "8"])
def test_adapters_on_a_quantized_base_are_trained(bits: str, folder: Path, tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    flags = ("--use_peft", "--lora_r", 4, f"--load_in_{bits}bit", "--lora_alpha", 8)
    ppo(folder, tmp_path / "ppo", {}, *flags)
    trained = load_file(next((tmp_path / "ppo").rglob("adapter_model.safetensors")))
    for name, weight in trained.items():
        assert torch.isfinite(weight).all(), name
    # They are 0 before training.
    outputs = [weight for name, weight in trained.items() if "lora_B" in name]
    assert outputs
    assert all(weight.abs().max() > 0 for weight in outputs)


def test_a_whole_run_of_the_flow(tmp_path: Path):
    table = tiny_table(tmp_path) | {"accept_reward_model": True}
    for section in ("sft", "reward_model_training", "ppo"):
        table[section] |= {"bf16": True}
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(table))
    run = start(tmp_path, "--config", "settings", "tiny.toml", "run")
    assert run.wait() == 0, run.log()


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_a_reward_adapter_on_a_sharded_policy(sharding: str, tmp_path: Path):
    """Its head is checked with the base on the CPU, and scores with the base on the GPU."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_classifier(make_policy("qwen2"), tmp_path)
    run_call(folder, call_of("reward adapter", folder, {"sharding": sharding}), processes=1)
    assert (folder / "said.json").exists()
