"""Policies between two policies, against their weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from ppo_core.errors import ModelError
from ppo_core.models.files.interpolation import write_interpolated
from ppo_core.models.loading import load_policy, load_tokenizer
from tests.helpers.models.tiny import make_policy, make_tokenizer


def write(folder: Path, family: str, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    make_policy(family, seed=seed).to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    return dict(load_policy(folder, dtype="auto").requires_grad_(False).named_parameters())


@pytest.mark.parametrize("position", [0.25, 1.2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_a_weight_lies_on_the_line_through_those_of_both_policies(
    family: str, position: float, tmp_path: Path
):
    start, end = write(tmp_path / "a", family, 1), write(tmp_path / "b", family, 2)
    write_interpolated(start, end, position, tmp_path / "c")
    begun, ended = weights_of(start), weights_of(end)
    for name, weight in weights_of(tmp_path / "c").items():
        expected = (1 - position) * begun[name] + position * ended[name]
        assert_close(weight, expected, rtol=0, atol=1e-6)
    assert load_tokenizer(tmp_path / "c").get_vocab() == load_tokenizer(end).get_vocab()


def test_the_policy_has_the_precision_of_the_end_and_is_computed_in_full_precision(tmp_path: Path):
    start = write(tmp_path / "a", "llama", 1)
    end = write(tmp_path / "b", "llama", 2, torch.bfloat16)
    write_interpolated(start, end, 0.5, tmp_path / "c")
    begun, ended = weights_of(start), weights_of(end)
    for name, weight in weights_of(tmp_path / "c").items():
        assert weight.dtype == torch.bfloat16
        expected = torch.lerp(begun[name], ended[name].float(), 0.5).bfloat16()
        assert torch.equal(weight, expected)


def test_tied_embeddings_stay_tied(tmp_path: Path):
    start, end = write(tmp_path / "a", "gpt2", 1), write(tmp_path / "b", "gpt2", 2)
    write_interpolated(start, end, 0.5, tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c", trust_remote_code=False)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_policies_of_other_parameters_are_refused_by_the_first_name(tmp_path: Path):
    start, end = write(tmp_path / "a", "llama", 1), write(tmp_path / "b", "gpt_neox", 2)
    with pytest.raises(ModelError, match=r"parameters of .* differ, for example .*Use '"):
        write_interpolated(start, end, 0.5, tmp_path / "c")
    assert not (tmp_path / "c").exists()
