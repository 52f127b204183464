"""The frozen reference model."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.model_with_value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
)
from ppo_core.models.reference import create_reference_model
from tests.helpers.models.families import (
    ENCODER_DECODERS,
    FAMILIES,
    LAYERS,
    make_inputs,
    make_model,
)

PLACES = {
    "bloom": "transformer.h",
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    "t5": "decoder.block",
    "bart": "model.decoder.layers",
}


def with_head(family: str) -> nn.Module:
    if family in ENCODER_DECODERS:
        return AutoModelForSeq2SeqLMWithValueHead(make_model(family))
    return AutoModelForCausalLMWithValueHead(make_model(family))


def shared_names(model: nn.Module, reference: nn.Module) -> set[str]:
    of_reference = dict(reference.named_parameters())
    return {name for name, p in model.named_parameters() if p is of_reference[name]}


@torch.no_grad()
def logits_of(model: nn.Module, family: str) -> torch.Tensor:
    return model(**make_inputs(family))[0]


@torch.no_grad()
def move(model: nn.Module) -> None:
    """Change all trainable parameters."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1)


@pytest.mark.parametrize("make", [make_model, with_head], ids=["plain", "value head"])
def test_a_copy_is_frozen_and_apart(make):
    model = make("gpt2").train()
    reference = create_reference_model(model)
    assert type(reference) is type(model)
    assert not shared_names(model, reference)
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert model.training and not any(module.training for module in reference.modules())
    before = logits_of(reference, "gpt2")
    move(model)
    assert_close(logits_of(reference, "gpt2"), before, rtol=0, atol=0)
    assert not torch.allclose(logits_of(model.eval(), "gpt2"), before)


@pytest.mark.parametrize("make", [make_model, with_head], ids=["plain", "value head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layers_are_the_same_and_frozen_in_both(make, family: str):
    model = make(family)
    before = logits_of(model, family)
    reference = create_reference_model(model, num_shared_layers=LAYERS - 1)

    shared = shared_names(model, reference)
    place = PLACES.get(family, "model.layers")
    for layer in range(LAYERS):
        of_layer = {n for n, _ in model.named_parameters() if f"{place}.{layer}." in n}
        assert of_layer
        assert of_layer & shared == (set() if layer == LAYERS - 1 else of_layer)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == shared
    assert not any(p.requires_grad for p in reference.parameters())

    move(model)
    assert_close(logits_of(reference, family), before, rtol=0, atol=0)
    assert not torch.allclose(logits_of(model, family), before)


def test_embeddings_are_shared_and_what_follows_the_layers_is_not():
    # OPT has its last norm and projection before its layers, in the order of its parameters.
    model = make_model("opt")
    shared = shared_names(model, create_reference_model(model, num_shared_layers=1))
    outside = {name for name in shared if ".layers." not in name}
    embeddings = {f"model.decoder.embed_{what}.weight" for what in ("tokens", "positions")}
    assert outside == embeddings


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_the_encoder_comes_before_the_first_layer_of_the_decoder(family: str):
    model = make_model(family)
    shared = shared_names(model, create_reference_model(model, num_shared_layers=1))
    assert {n for n, _ in model.named_parameters() if "encoder." in n} <= shared
    of_decoder = {n for n, _ in model.named_parameters() if "decoder." in n}
    assert of_decoder & shared
    assert of_decoder - shared


def test_the_first_layer_is_not_the_tenth():
    config = GPT2Config(vocab_size=11, n_embd=4, n_layer=11, n_head=1, n_positions=8)
    model = AutoModelForCausalLM.from_config(config)
    shared = shared_names(model, create_reference_model(model, num_shared_layers=2))
    assert {name.split(".")[2] for name in shared if ".h." in name} == {"0", "1"}
    with pytest.raises(ConfigError, match="from 1 to 11"):
        create_reference_model(model, num_shared_layers=12)


def test_a_pattern_finds_layers_under_another_name():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = make_model("gpt2").config
            self.blocks = nn.ModuleList(nn.Embedding(2, 2) for _ in range(3))

    model = Stack()
    reference = create_reference_model(model, num_shared_layers=1, pattern="blocks.{layer}")
    assert shared_names(model, reference) == {"blocks.0.weight"}
    with pytest.raises(ModelError, match=r"Stack.*transformer\.h.*blocks"):
        create_reference_model(Stack(), num_shared_layers=1)


def test_a_pattern_that_fits_nothing_names_the_model_and_what_its_layers_are_called():
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel.*model\.layers.*transformer\.h\."):
        create_reference_model(
            make_model("gpt2"), num_shared_layers=1, pattern="model.layers.{layer}"
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_shared_layers": 0}, f"from 1 to {LAYERS}"),
        ({"num_shared_layers": LAYERS + 1}, f"from 1 to {LAYERS}"),
        ({"num_shared_layers": 1, "pattern": "transformer.h"}, "{layer}"),
        ({"pattern": "transformer.h.{layer}"}, "num_shared_layers"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(settings: dict, words: str):
    model = make_model("gpt2")
    with pytest.raises(ConfigError, match=words):
        create_reference_model(model, **settings)
    assert all(p.requires_grad for p in model.parameters())


def test_all_layers_can_be_shared():
    model = make_model("llama")
    shared = shared_names(model, create_reference_model(model, num_shared_layers=LAYERS))
    assert shared == {n for n, _ in model.named_parameters()} - {
        "model.norm.weight",
        "lm_head.weight",
    }


def test_an_adapter_is_its_own_reference():
    lora = LoraConfig(r=2, task_type="CAUSAL_LM")
    adapted = get_peft_model(make_model("gpt2"), copy.deepcopy(lora))
    injected = make_model("gpt2")
    injected.add_adapter(copy.deepcopy(lora))
    for model in (adapted, AutoModelForCausalLMWithValueHead(adapted), injected):
        with pytest.raises(ModelError, match="adapter switched off"):
            create_reference_model(model)


def test_parameters_that_zero3_has_partitioned_are_not_copied():
    # TRL #2557: the copy had no weights.
    model = make_model("gpt2")
    next(model.parameters()).ds_id = 0  # what deepspeed puts on every parameter it partitions
    with pytest.raises(ModelError, match="before the engine"):
        create_reference_model(model)
