"""Bases in 4 and 8 bits on the CPU: loaded, trained with an adapter, merged, saved and loaded."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_core.models.adapters import add_adapter
from ppo_core.models.files.merge_adapter import merged_copy
from ppo_core.models.loading import load_policy
from ppo_core.models.model_with_value_head import AutoModelForCausalLMWithValueHead
from ppo_core.models.quantization import bitsandbytes_config, is_quantized
from tests.helpers.models.tiny import make_policy

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

IDS = torch.tensor([[3, 9, 4, 17, 5, 30], [8, 2, 40, 6, 11, 7]])

PRECISIONS = {
    "nf4": {"load_in_4bit": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4, nested": {"load_in_4bit": True, "use_bnb_nested_quant": True},
    "int8": {"load_in_8bit": True},
}

TOLERANCE = {"int8": 0.1}
"""The products of int8 round the activations too, and a merged adapter is not rounded with them."""


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_merged_policy_is_the_trained_one(tmp_path: Path, precision: str, architecture: str):
    make_policy(architecture).save_pretrained(tmp_path / "base")
    chosen = {"load_in_4bit": False, "load_in_8bit": False} | PRECISIONS[precision]
    base = load_policy(tmp_path / "base", quantization_config=bitsandbytes_config(**chosen))
    assert is_quantized(base)
    plain = load_policy(tmp_path / "base")
    assert not torch.allclose(base(IDS).logits, plain(IDS).logits, atol=1e-3)

    model = add_adapter(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    before = frozen_bytes(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    losses = []
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.001
    assert frozen_bytes(model) == before

    merged_copy(model).save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not is_quantized(loaded)
    assert not hasattr(loaded.config, "quantization_config")
    with torch.no_grad():
        expected, found = model(IDS).logits, loaded(IDS).logits
        with model.disable_adapter():
            untrained = model(IDS).logits
    trained = expected - untrained
    assert (found - expected).norm() < TOLERANCE.get(precision, 1e-4) * trained.norm()
    assert frozen_bytes(model) == before


def test_a_value_head_stands_on_a_quantised_base(tmp_path: Path):
    make_policy("gpt2").save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path, load_in_8bit=True, peft_config=peft.LoraConfig(r=2)
    )
    assert is_quantized(model.pretrained_model)
    logits, _, values = model(IDS)
    assert logits.isfinite().all() and values.shape == IDS.shape


def frozen_bytes(model: torch.nn.Module) -> dict[str, bytes]:
    """The weights that are not trained, as they are stored."""
    return {
        name: weight.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, weight in model.named_parameters()
        if not weight.requires_grad
    }
