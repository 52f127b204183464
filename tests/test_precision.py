"""Which precision and which products a training takes by itself."""

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_core import fp32_products, parts, precision
from ppo_core.fp32_products import fast_fp32_products, matmul_precision
from ppo_core.models import LanguageModel
from ppo_core.precision import trains_in_bf16
from tests.test_trainer import make_trainer
from tests.tiny import make_policy


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    fp32_products._onednn_is_exact.cache_clear()
    yield
    fp32_products._onednn_is_exact.cache_clear()


def policy_of_width(width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("width", [256, 192])
def test_bfloat16_is_taken_where_the_machine_has_it_and_the_policy_is_wide(
    width, has_units, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_units})
    policy = policy_of_width(width)
    assert trains_in_bf16(None, policy, use_cpu=True) == (has_units and width == 256)
    for asked in (True, False):
        assert trains_in_bf16(asked, policy, use_cpu=True) == asked


def test_weights_of_another_precision_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(precision, "SMALLEST_WIDTH", 8)
    assert trains_in_bf16(None, make_policy(), use_cpu=True)
    assert not trains_in_bf16(None, make_policy().double(), use_cpu=True)


def test_the_products_of_a_bfloat16_policy_are_of_log_probabilities_in_fp32():
    policy = LanguageModel(make_policy())
    states = torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(policy.head(states).float(), policy.logits(states))
        inside = policy.logits(states)
    assert torch.equal(inside, policy.logits(states))


def test_fast_products_are_those_of_fp32_and_leave_nothing_behind():
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(2, 300, 300, generator=generator)
    exact = left.double() @ right.double()
    with fast_fp32_products():
        error = (left @ right - exact).abs().max()
    assert error < 1e-4
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("most_error", "inside"), [(1.0, "medium"), (0.0, "highest")])
def test_a_library_that_rounds_too_much_is_not_taken(most_error, inside, monkeypatch):
    monkeypatch.setattr(fp32_products, "MOST_ERROR", most_error)
    with fast_fp32_products():
        assert torch.get_float32_matmul_precision() == inside


def test_a_precision_that_was_chosen_stays():
    with matmul_precision("high"), fast_fp32_products():
        assert torch.get_float32_matmul_precision() == "high"


def precision_of_an_update(**changes: object) -> str:
    seen = []
    trainer = make_trainer(**changes)
    layer = trainer.policy.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    trainer.step()
    assert torch.get_float32_matmul_precision() == "highest"
    (one,) = set(seen)
    return one


def test_a_training_multiplies_by_the_faster_library_where_all_of_it_gains(monkeypatch):
    monkeypatch.setattr(fp32_products, "MOST_ERROR", 1.0)  # also on a processor that rounds
    assert precision_of_an_update() == "highest"  # it is 32 wide
    monkeypatch.setattr(parts, "SMALLEST_WIDTH", 32)
    assert precision_of_an_update() == "medium"
