"""The memory of PPO: arithmetic that a reader can redo, and sizes of published models."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from pipeline.cost.memory.model_size import count_adapter_parameters, model_size
from pipeline.cost.memory.ppo_memory import PPOSize, host_memory, peak_memory, phases
from pipeline.cost.memory.sizes import PROCESS, ModelSize, describe_training_memory
from pipeline.cost.memory.supervised_memory import SupervisedSize, supervised_phases
from tests.helpers.models.published_sizes import LLAMA
from tests.helpers.models.tiny import make_policy

MODEL = ModelSize(
    parameters=1_000,
    outside_layers=200,
    layers=2,
    width=10,
    mlp_width=30,
    is_gated=True,
    heads=2,
    key_width=5,
    vocabulary=20,
)
SIZE = PPOSize(
    policy=MODEL,
    critic=MODEL,
    rewards=(MODEL,),
    prompt_tokens=3,
    response_tokens=4,
    sampled_rows=2,
    trained_rows=1,
    trained_tokens=7,
)
SCORED, TRAINED = 4 * 2 * 4 * 20, 4 * 1 * 4 * 20
"""Logits in fp32 of 2 and of 1 response of 4 tokens, 20 each."""


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
    assert scoring.activations == 14 * 4 * 130 + SCORED
    # Two layers of 7 tokens: 8 x 10 + 2 x 5 + 4 x 30 = 210 numbers; and the head's gradient.
    assert update.activations == 7 * 4 * 210 * 2 + 4 * 10 * 20 + TRAINED
    assert peak_memory(SIZE) == update
    assert update.total == 16_000 + 16_000 + 8_000 + update.activations


def test_recomputed_activations_are_one_layer_and_the_inputs_of_all():
    update = phases(replace(SIZE, recomputes=True))[2]
    assert update.activations == 7 * (4 * 210 + 4 * 10 * 2) + 4 * 10 * 20 + TRAINED


def test_an_adapter_by_hand():
    """The base in bfloat16 is the reference, too; a shared critic is a head of 10 weights."""
    size = replace(SIZE, adapter=50, base_bytes=2, critic=None, autocast=True, recomputes=True)
    sampling, scoring, update = phases(size)
    # Base 2 x 1000, trained 4 x 60, reward model 4 x 1000; autocast copies the adapter.
    assert update.weights == 2_000 + 240 + 4_000
    assert sampling.weights == update.weights + 2 * 50
    assert (update.optimizer, update.gradients) == (480, 240)
    assert sampling.cache == 2 * 2 * 5 * 2 * 20
    # Four tensors of 30 numbers inside the MLP; the reward model, which has no adapter, has three.
    assert sampling.activations == 6 * (4 * 4 * 10 + 4 * 2 * 30)
    assert scoring.activations == 14 * (4 * 4 * 10 + 4 * 2 * 30) + 3 * SCORED
    # Autograd keeps three copies of the logits in the loss.
    # Norms 4 x 4 x 10; 2 bytes of 4 x 10 + 2 x 5 + 4 x 30, and of the inputs 6 x 10 + 30.
    layer = 160 + 2 * 170 + 2 * 90
    assert update.activations == 7 * (layer + 4 * 10 * 2) + 2 * 50 + 3 * TRAINED


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


def test_a_chunk_has_no_more_logits_than_the_head_computes_at_a_time():
    large = replace(SIZE, policy=replace(MODEL, vocabulary=2**22), response_tokens=4)
    # One response has 4 x 2^22 logits, and a chunk 2^23.
    assert phases(large)[1].activations == 14 * 4 * 130 + 4 * 2**23


def test_a_process_on_the_cpu_by_hand():
    size = replace(SIZE, on_cpu=True, response_tokens=8)
    sampling, scoring, update, loading, saving = phases(size)
    assert {each.process for each in phases(size)} == {PROCESS}
    # oneDNN packs the layers' 800 weights and the head's 10 x 20, in fp32.
    assert sampling.weights == 16_000 + 4 * 1_000
    assert scoring.weights == loading.weights == 16_000
    # Of 2000 trained parameters, the weights and two moments.
    assert saving.copies == 3 * 4 * 2_000
    assert (saving.gradients, saving.optimizer) == (0, 16_000)
    # Attention weights: 7 tokens x the mean of the keys, (11 + 64) / 2 but at most 11, x 2 heads x
    # 2 layers, of two models one after the other.
    activations = 7 * 4 * 210 * 2 + 4 * 7 * 11 * 2 * 2
    assert update.activations == activations + 4 * 10 * 20 + 4 * 1 * 8 * 20


def test_sharded_processes_on_the_cpu_load_full_models_and_save_full_weights():
    loading, saving = phases(replace(SIZE, on_cpu=True, sharding="fsdp2", processes=2))[3:]
    assert (loading.weights, loading.optimizer) == (16_000, 0)
    assert (saving.weights, saving.optimizer) == (8_000, 8_000)
    # The first process has all weights, and half of the moments.
    assert saving.copies == 4 * 2_000 + 2 * 4 * 2_000 // 2


def test_the_processes_of_a_machine_read_all_models_into_its_main_memory():
    size = replace(SIZE, sharding="zero3", processes=4)
    copies = 4 * 2_000 + 2 * 4 * 2_000 // 4
    assert host_memory(size) == 4 * (16_000 + PROCESS) + copies
    # Of two machines, each has two of the processes.
    assert host_memory(replace(size, machines=2)) == 2 * (16_000 + PROCESS) + copies


def test_a_running_average_is_a_copy_of_the_trained_weights_of_the_policy():
    for adapter, average in ((0, 4_000), (50, 200)):
        size = replace(SIZE, adapter=adapter)
        for with_average, without in zip(
            phases(replace(size, averages=True)), phases(size), strict=True
        ):
            assert with_average.total - without.total == average


def test_supervised_training_by_hand():
    size = SupervisedSize(model=MODEL, writes=True, tokens=7)
    (step,) = supervised_phases(size)
    assert (step.weights, step.gradients, step.optimizer) == (4_000, 4_000, 8_000)
    # Activations as in PPO, the head's gradient, and the logits of 7 tokens, fewer than a chunk.
    assert step.activations == 7 * 4 * 210 * 2 + 4 * 10 * 20 + 4 * 7 * 20
    (ranked,) = supervised_phases(replace(size, writes=False))
    assert ranked.activations == 7 * 4 * 210 * 2
    # A frozen head has no gradient, and sharded gradients are counted with the layers.
    (adapted,) = supervised_phases(replace(size, adapter=50))
    assert adapted.activations == 7 * 4 * (210 + 6 * 10 + 30) * 2 + 4 * 7 * 20
    (sharded,) = supervised_phases(replace(size, sharding="fsdp2", processes=2))
    gathered = 2 * 4 * (2 * 400 + 200)
    assert sharded.activations == 7 * 4 * 210 * 2 + 4 * 7 * 20 + gathered


def test_short_texts_keep_attention_weights_beside_longer_ones():
    size = SupervisedSize(
        model=MODEL, writes=False, tokens=1_024, longest=256, texts=2, on_cpu=True
    )
    # A pass of pairs of 256 tokens: 1,024 tokens x (512 + 64) / 2 keys x 2 heads x 2 layers.
    expected = 1_024 * 4 * 210 * 2 + 4 * 1_024 * 288 * 2 * 2
    for longest in (256, 400):
        step = supervised_phases(replace(size, longest=longest))[0]
        assert step.activations == expected
    # Of a row of PPO: 1,024 tokens x (256 + 64) / 2 keys x 2 heads x 2 layers.
    longer = replace(SIZE, on_cpu=True, prompt_tokens=396, trained_tokens=1_024)
    update = phases(longer)[2]
    attended = 4 * 1_024 * 160 * 2 * 2
    assert update.activations == 1_024 * 4 * 210 * 2 + attended + 4 * 10 * 20 + TRAINED


def test_each_further_reward_model_is_held_and_the_largest_scores():
    larger = replace(MODEL, parameters=3_000, width=20)
    plain, several = phases(SIZE)[1], phases(replace(SIZE, rewards=(MODEL, MODEL, larger)))[1]
    # 4 bytes of 1000 and of 3000 parameters more.
    assert several.weights == plain.weights + 16_000
    # One layer of 14 tokens: 4 x 20 + 3 x 30 numbers of 4 bytes, in place of 4 x 10 + 3 x 30.
    assert several.activations == 14 * 4 * 170 + SCORED
    assert plain.activations == 14 * 4 * 130 + SCORED


def test_supervised_training_with_an_adapter_by_hand():
    size = SupervisedSize(model=MODEL, writes=False, adapter=50, tokens=7, on_cpu=True)
    step, loading, saving = supervised_phases(size)
    # A frozen base in fp32, and 50 parameters with gradient and two moments.
    assert (step.weights, step.gradients, step.optimizer) == (4_000 + 200, 200, 400)
    assert step.activations == 7 * 4 * (210 + 6 * 10 + 30) * 2
    assert (loading.weights, saving.copies) == (4_200, 3 * 200)
    # The base is loaded again to merge the adapter.
    assert saving.weights == 4_200 + 4_000


def test_a_frozen_base_in_bfloat16_by_hand():
    """Of 1,000 parameters, the layers' are in bfloat16, unless they are sharded."""
    size = SupervisedSize(model=MODEL, writes=False, adapter=50, tokens=7, autocast=True)
    (step,) = supervised_phases(size)
    outside = MODEL.outside_layers
    assert 0 < outside < 1_000
    assert step.weights == 4 * outside + 2 * (1_000 - outside) + 200
    (sharded,) = supervised_phases(replace(size, processes=2, sharding="zero2"))
    assert sharded.weights == step.weights
    (sharded,) = supervised_phases(replace(size, processes=2, sharding="fsdp2"))
    assert sharded.weights == (4_000 + 200) // 2


def test_the_line_names_the_phase_and_the_parts():
    line = describe_training_memory(phases(SIZE)[2], "GPU", "PPO")
    assert line == (
        "memory: about 0.0 GiB per GPU, computed for the update of PPO (weights 0.0, "
        "gradients 0.0, optimizer 0.0, activations 0.0)"
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
    assert count_adapter_parameters(model, 8, ["self_attn.q_proj"]) == 8 * 32 * 8_192


def test_experts_have_a_gate_although_it_is_no_linear_layer():
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    assert model_size(without_weights(config)).is_gated


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


@pytest.mark.parametrize(
    ("name", "heads", "key_width", "mlp_width"),
    [
        ("gemma4_text", 8, 4 * 512, 9_216),  # every sixth layer has heads of 512, others of 256
        ("gemma3n_text", 8, 2 * 256, 16_384),  # one MLP width for each layer
        ("mamba", 0, 0, 2 * 2_048),
        ("xlstm", 0, 0, 4 * 2_048),
    ],
)
def test_sizes_of_layers_that_differ_or_have_no_attention(name, heads, key_width, mlp_width):
    config = AutoConfig.for_model(
        name, hidden_size=2_048, num_hidden_layers=6, num_kv_shared_layers=0
    )
    size = model_size(without_weights(config))
    assert (size.heads, size.key_width, size.mlp_width) == (heads, key_width, mlp_width)
    assert size.of_a_layer > 0


# --- Published shapes, by arithmetic that a reader can redo ------------------------


@pytest.mark.parametrize("name", LLAMA)
def test_parameters_of_published_shapes(name: str):
    size, parameters = LLAMA[name]
    assert size.parameters == parameters


def shared(name: str, **settings) -> PPOSize:
    """PPO in bfloat16 with a head as critic, and a reward model of the policy's size."""
    model = LLAMA[name][0]
    return PPOSize(
        policy=model,
        critic=None,
        rewards=(model,),
        autocast=True,
        recomputes=True,
        prompt_tokens=1_024,
        response_tokens=512,
        sampled_rows=8,
        trained_rows=2,
        trained_tokens=2 * 1_536,
        **settings,
    )


def test_the_update_of_1b_on_one_gpu_by_hand():
    update = phases(shared("1B"))[2]
    # Policy, reference and reward model in fp32, 3 x 4 x 1,100,048,384; the critic's head 4 x 2048.
    assert update.weights == 13_200_580_608 + 8_192
    # A gradient and two moments of 1,100,050,432 trained parameters.
    assert update.gradients == 4_400_201_728
    assert update.optimizer == 8_800_403_456
    # 3072 tokens: a layer 4 x 4 x 2048 + 2 x (4 x 2048 + 2 x 256 + 4 x 5632) = 95,232 bytes, the
    # inputs of 22 layers 4 x 2048 x 22 = 180,224: 846,200,832. bfloat16 weights 2,200,096,768. The
    # head's gradient 4 x 2048 x 32000 = 262,144,000. Logits 12 x 2^23 = 100,663,296.
    assert update.activations == 846_200_832 + 2_200_096_768 + 262_144_000 + 100_663_296
    # The sum is 27.8 GiB.
    assert update.total == 26_401_193_984 + 3_409_104_896 == 29_810_298_880


def test_the_update_of_8b_sharded_over_8_gpus_by_hand():
    update = phases(shared("8B", sharding="fsdp2", processes=8))[2]
    # (3 x 4 x 8,030,261,248 + 4 x 4096) / 8, and an eighth of gradients and moments.
    assert update.weights == (96_363_134_976 + 16_384) // 8
    assert update.gradients == 4 * 8_030_265_344 // 8
    assert update.optimizer == 8 * 8_030_265_344 // 8
    # Weights and gradients of two layers and of what is outside, in fp32:
    # 2 x 4 x (2 x 218,112,000 + 1,050,677,248) = 11,895,209,984. bfloat16 weights 16,060,522,496.
    # 3072 tokens: a layer 16 x 4096 + 2 x (4 x 4096 + 2 x 1024 + 4 x 14336) = 217,088, inputs
    # 16384 x 32 = 524,288: 2,277,507,072. Logits 100,663,296.
    assert update.activations == 11_895_209_984 + 16_060_522_496 + 2_277_507_072 + 100_663_296


def test_70b_needs_more_than_8_gpus_of_80_gb_whatever_the_sharding():
    # Policy, reference and reward model 3 x 4, gradient 4 and moments 8 bytes: 24 bytes for each of
    # 70,553,706,496 parameters are 1577 GiB, 197 GiB on each of 8.
    for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        update = phases(shared("70B", sharding=kind, processes=8))[2]
        assert update.total > 197 * 2**30
    # Sampling gathers the 282 GB of the policy, which no single GPU has.
    assert phases(shared("70B", sharding="fsdp2", processes=64))[0].weights > 282 * 10**9
