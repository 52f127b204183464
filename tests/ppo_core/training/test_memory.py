"""The memory of PPO: arithmetic that a reader can redo, and sizes of published models."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

from ppo_core.training.memory import ModelSize, PPOSize, describe_memory, peak_memory, phases
from ppo_core.training.model_size import count_adapter_parameters, model_size
from tests.helpers.tiny import make_policy

MODEL = ModelSize(
    parameters=1_000,
    outside_layers=200,
    layers=2,
    width=10,
    mlp_width=30,
    is_gated=True,
    key_width=5,
    vocabulary=20,
)
SIZE = PPOSize(
    policy=MODEL,
    critic=MODEL,
    reward=MODEL,
    prompt_tokens=3,
    response_tokens=4,
    sampled_rows=2,
    trained_tokens=7,
)
CHUNK = 3 * 4 * 2**23
"""A chunk of logits, three times in fp32."""


def test_full_training_by_hand():
    sampling, scoring, update = phases(SIZE)
    # Policy, critic, reference and reward model: 4 x 1000 parameters of 4 bytes.
    assert sampling.weights == scoring.weights == update.weights == 16_000
    # Two moments, and a gradient, of 2000 trained parameters.
    assert (sampling.optimizer, sampling.gradients) == (16_000, 0)
    assert (update.optimizer, update.gradients) == (16_000, 8_000)
    # Keys and values, 2 layers, 5 numbers, 4 bytes, of 2 x (2 x 3 + 4) tokens.
    assert sampling.cache == 2 * 2 * 5 * 4 * 20
    # One layer of 6 tokens: 4 x 10 + 3 x 30 numbers of 4 bytes.
    assert sampling.activations == 6 * 4 * 130
    assert scoring.activations == 14 * 4 * 130 + CHUNK
    # Two layers of 7 tokens: 8 x 10 + 2 x 5 + 4 x 30 = 210 numbers; and the head's gradient.
    assert update.activations == 7 * 4 * 210 * 2 + 4 * 10 * 20 + CHUNK
    assert peak_memory(SIZE) == update
    assert update.total == 16_000 + 16_000 + 8_000 + update.activations


def test_recomputed_activations_are_one_layer_and_the_inputs_of_all():
    update = phases(replace(SIZE, recomputes=True))[2]
    assert update.activations == 7 * (4 * 210 + 4 * 10 * 2) + 4 * 10 * 20 + CHUNK


def test_an_adapter_by_hand():
    """The base in bfloat16 is the reference, too; a shared critic is a head of 10 weights."""
    size = replace(SIZE, adapter=50, base_bytes=2, critic=None, autocast=True, recomputes=True)
    sampling, _, update = phases(size)
    # Base 2 x 1000, trained 4 x 60, reward model 4 x 1000; autocast copies the adapter.
    assert update.weights == 2_000 + 240 + 4_000
    assert sampling.weights == update.weights + 2 * 50
    assert (update.optimizer, update.gradients) == (480, 240)
    assert sampling.cache == 2 * 2 * 5 * 2 * 20
    # Norms 4 x 4 x 10; 2 bytes of 4 x 10 + 2 x 5 + 4 x 30, and of the inputs 6 x 10 + 30.
    layer = 160 + 2 * 170 + 2 * 90
    assert update.activations == 7 * (layer + 4 * 10 * 2) + 2 * 50 + CHUNK


def test_sharding_by_hand():
    two = replace(SIZE, processes=2)
    by_kind = {kind: phases(replace(two, sharding=kind)) for kind in ("ddp", "zero2", "fsdp2")}
    assert {kind: each[0].weights for kind, each in by_kind.items()} == {
        "ddp": 16_000,
        "zero2": 16_000,
        # Half of all weights, and policy and critic gathered.
        "fsdp2": 8_000 + 8_000,
    }
    # DistributedDataParallel has buffers of the size of the gradients.
    gradients = {kind: each[2].gradients for kind, each in by_kind.items()}
    assert gradients == {"ddp": 16_000, "zero2": 4_000, "fsdp2": 4_000}
    # ZeRO-2 has a copy of its half of the weights beside the moments.
    optimizer = {kind: each[2].optimizer for kind, each in by_kind.items()}
    assert optimizer == {"ddp": 16_000, "zero2": 12_000, "fsdp2": 8_000}
    layerwise = phases(replace(two, sharding="fsdp2", gathers=False))[0]
    # What is outside the layers, and two layers of 400.
    assert layerwise.weights == 8_000 + 4 * (200 + 2 * 400)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3", "fsdp2"])
def test_more_processes_need_no_more_memory_each(sharding):
    totals = [
        peak_memory(replace(SIZE, sharding=sharding, processes=number)).total
        for number in (2, 4, 8)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


def test_the_line_names_the_phase_and_the_parts():
    line = describe_memory(phases(SIZE)[2], "GPU")
    assert line == (
        "memory: about 0.1 GiB per GPU, computed for the update of PPO (weights 0.0, "
        "gradients 0.0, optimizer 0.0, activations 0.1)"
    )


def without_weights(config, auto_class=AutoModelForCausalLM) -> PreTrainedModel:
    with torch.device("meta"):
        return auto_class.from_config(config)


def test_sizes_of_a_published_model():
    """Llama-3.1-8B has 8,030,261,248 parameters, of which 1.05 billion are embeddings and head."""
    model = without_weights(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=4_096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    )
    size = model_size(model)
    assert size.parameters == 8_030_261_248
    assert size.outside_layers == 2 * 128_256 * 4_096 + 4_096
    assert (size.layers, size.width, size.mlp_width, size.is_gated) == (32, 4_096, 14_336, True)
    assert (size.key_width, size.vocabulary) == (8 * 128, 128_256)
    # Of each layer: q and o 8192, k and v 5120 each, three matrices 18432 inputs and outputs.
    inputs_and_outputs = 32 * (2 * 8_192 + 2 * 5_120 + 3 * 18_432)
    assert count_adapter_parameters(model, 16, ["all-linear"]) == 16 * inputs_and_outputs
    assert count_adapter_parameters(model, 8, ["q_proj"]) == 8 * 32 * 8_192


def test_sizes_of_a_published_reward_model():
    """Skywork-Reward-V2-Qwen3-0.6B has 596,050,944 parameters."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1_024,
        intermediate_size=3_072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        num_labels=1,
    )
    size = model_size(without_weights(config, AutoModelForSequenceClassification))
    assert size.parameters == 596_050_944
    assert size.key_width == 1_024


@pytest.mark.parametrize(
    ("family", "is_gated"), [("gpt2", False), ("gpt_neox", False), ("qwen2", True)]
)
def test_sizes_of_any_family(family, is_gated):
    policy = make_policy(family)
    size = model_size(policy)
    assert (size.layers, size.width, size.is_gated) == (2, 32, is_gated)
    inside = sum(
        p.numel() for name, p in policy.named_parameters() if ".0." in name or ".1." in name
    )
    assert size.parameters - size.outside_layers == inside == 2 * size.of_a_layer
