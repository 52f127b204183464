"""Supervised training in two processes ends as in one, with every sharding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch.testing import assert_close

from ppo_core.supervised import training_loop
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training import train_reward_model, train_sft
from tests.architectures.zoo import small_model
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_policy
from tests.helpers.runs.forked_python import run_python
from tests.helpers.slow_cases import slow

ROWS = {
    "sft": [
        {"prompt": f"w{n} w1", "completion": " ".join(f"w{m}" for m in range(2, 3 + n % 5))}
        for n in range(37)
    ],
    "reward": [
        {"prompt": f"w{n}", "chosen": "w1 w2", "rejected": " ".join(["w3"] * (1 + n % 4))}
        for n in range(37)
    ],
}
"""An odd number of rows, so that the last step has fewer than the processes can share."""

STEPS = 20
TRAININGS = {"sft": train_sft, "reward": train_reward_model}
SHARDINGS: list[dict[str, Any]] = [
    {"sharding": "ddp"},
    {"sharding": "zero1"},
    {"sharding": "zero2", "offload": True},
    {"sharding": "zero3"},
    {"sharding": "fsdp2"},
    {"sharding": "fsdp2", "offload": True},
]


def train(kind: str, folder: str, changes: dict[str, Any], lora: bool) -> None:
    """Train with SGD, because Adam amplifies rounding of gradients near 0."""
    torch.set_num_threads(1)
    training_loop.make_optimizer = lambda module, config: torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], lr=config.learning_rate
    )
    settings: dict[str, Any] = {
        "learning_rate": 0.3,
        "batch_size": 3,
        "gradient_accumulation_steps": 3,
        "num_epochs": 4,
        "max_length": 64,
    }
    adapter = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj"]) if lora else None
    TRAININGS[kind](
        Path(folder).parent / "base",
        ROWS[kind],
        SupervisedConfig(**settings | changes),
        folder,
        peft_config=adapter,
    )


def run(
    kind: str,
    folder: Path,
    changes: dict[str, Any],
    *,
    lora: bool,
    processes: int,
    before: str = "",
) -> None:
    """Train in processes that first run the statement `before`."""
    arguments = (kind, str(folder), changes, lora)
    imports = "from tests.ppo_core.supervised.test_processes import train, training_loop"
    call = f"{imports}\n{before}\ntrain(*{arguments!r})"
    ended = run_python("-c", call, processes=processes)
    assert not ended.returncode, ended.stderr[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("processes")
    make_policy().save_pretrained(made / "base")
    make_chat_tokenizer().save_pretrained(made / "base")
    for kind in TRAININGS:
        for lora in (False, True):
            run(kind, made / f"{kind}-{lora}", {}, lora=lora, processes=1)
    return made


@pytest.mark.parametrize("lora", [False, *slow(True)])
def test_a_model_of_text_and_images_is_trained_in_two_processes(tmp_path: Path, lora: bool):
    # No text passes through its vision tower, so these weights have no gradients.
    small_model("mistral3").save_pretrained(tmp_path / "base")
    make_chat_tokenizer().save_pretrained(tmp_path / "base")
    run("sft", tmp_path / "sft", {"sharding": "ddp", "num_epochs": 1}, lora=lora, processes=2)
    assert len(metrics(tmp_path / "sft")) == STEPS / 4


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same(folder: Path, alone: Path) -> None:
    ours, theirs = (load_file(each / "model.safetensors") for each in (folder, alone))
    assert_close(ours, theirs, rtol=0, atol=1e-5)
    lines = metrics(alone)
    assert len(lines) == STEPS
    for mine, one in zip(metrics(folder), lines, strict=True):
        norms = mine.pop("grad_norm"), one.pop("grad_norm")
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        assert mine == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("sharding", ["zero3", "fsdp2"])
def test_two_processes_train_as_one(folder: Path, kind: str, sharding: str):
    lora = (kind == "sft") == (sharding == "fsdp2")
    made = folder / f"{kind}-{sharding}-{lora}"
    run(kind, made, {"sharding": sharding}, lora=lora, processes=2)
    assert_same(made, folder / f"{kind}-{lora}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("changes", SHARDINGS, ids=str)
def test_every_sharding_trains_as_one_process(
    folder: Path, kind: str, lora: bool, changes: dict[str, Any]
):
    made = folder / f"slow-{kind}-{lora}-{'-'.join(map(str, changes.values()))}"
    run(kind, made, changes, lora=lora, processes=2)
    assert_same(made, folder / f"{kind}-{lora}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_frozen_matrices_in_bf16_train_the_same_model_bit_for_bit(
    folder: Path, kind: str, sharding: str
):
    files = []
    in_fp32 = "training_loop.keep_frozen_in_bf16 = lambda *_: None"
    for name, before in (("rounded", ""), ("exact", in_fp32)):
        made = folder / f"bf16-{kind}-{sharding}-{name}"
        changes = {"sharding": sharding, "bf16": True}
        run(kind, made, changes, lora=True, processes=2, before=before)
        files.append(
            [(made / file).read_bytes() for file in ("model.safetensors", "metrics.jsonl")]
        )
    assert files[0] == files[1]
