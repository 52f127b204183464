"""Where a model that is only read goes: a GPU if there is one, in the precision of the setting."""

import psutil
import pytest
import torch

from ppo_core.config import placement
from ppo_core.config.placement import (
    Placement,
    free_memory,
    main_memory,
    placement_for_reading,
)
from ppo_core.models.loading import load_policy, load_reward_model
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("gpu", "has_bf16", "precision", "expected"),
    [
        (None, False, "auto", Placement(CPU, torch.float32)),
        (None, True, "auto", Placement(CPU, torch.float32)),
        (None, False, "bf16", Placement(CPU, torch.bfloat16)),
        (GPU, True, "auto", Placement(GPU, torch.bfloat16)),
        (GPU, False, "auto", Placement(GPU, torch.float32)),
        (GPU, False, "bf16", Placement(GPU, torch.bfloat16)),
        (GPU, True, "fp32", Placement(GPU, torch.float32)),
    ],
)
def test_the_placement(gpu, has_bf16, precision, expected, monkeypatch):
    monkeypatch.setattr(placement, "_gpu", lambda: gpu)
    monkeypatch.setattr(placement, "_computes_in_bf16", lambda: has_bf16)
    assert placement_for_reading(precision) == expected


def test_each_process_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert placement_for_reading("fp32").device == torch.device("cuda", 3)


def test_the_memory_of_a_container_is_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "_CONTAINER", tmp_path)
    of_the_machine = psutil.virtual_memory().total
    assert main_memory() == of_the_machine
    (tmp_path / "memory.max").write_text("1000\n")
    assert main_memory() == 1000
    (tmp_path / "memory.max").write_text(f"{2 * of_the_machine}\n")
    assert main_memory() == of_the_machine


def test_the_free_memory_of_a_container_counts_what_the_kernel_would_drop(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "_CONTAINER", tmp_path)
    of_the_machine = free_memory(CPU)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 300\n")
    assert free_memory(CPU) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU) == pytest.approx(of_the_machine, rel=0.5)


def test_a_model_is_loaded_in_the_precision_of_its_placement(tmp_path):
    for make, name in ((make_policy, "policy"), (make_classifier, "rm")):
        make().save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    policy = load_policy(tmp_path / "policy", placement=placement_for_reading("bf16"))
    assert {each.dtype for each in policy.parameters()} == {torch.bfloat16}
    reward_model = load_reward_model(tmp_path / "rm", placement=placement_for_reading()).model
    assert {each.dtype for each in reward_model.parameters()} == {torch.float32}
