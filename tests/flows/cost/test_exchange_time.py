"""The time in which processes exchange weights and gradients, by hand and measured."""

import re
from dataclasses import dataclass, replace

import pytest
from transformers import Mistral3ForConditionalGeneration

from pipeline.cost.exchange_time import (
    ParameterCount,
    ppo_exchange_seconds,
    supervised_exchange_seconds,
)
from pipeline.cost.gpu_table import read_gpus
from pipeline.cost.measured_speed import LinearCost, MeasuredSpeed, measure_speed
from pipeline.cost.memory.model_size import model_size
from pipeline.cost.memory.ppo_memory import PPOSize
from pipeline.cost.memory.sizes import ModelSize
from pipeline.cost.memory.supervised_memory import SupervisedSize
from pipeline.cost.run_time import LINK_SHARE, Backward, TableSpeed
from pipeline.settings.hardware_config import HardwareConfig
from ppo_core.errors import ModelError, ProcessError
from ppo_core.training.speed.job import FoundSpeed, PassSeconds
from tests.architectures.zoo import small_config
from tests.helpers.models.tiny import make_policy

POLICY = ModelSize(
    parameters=100 + 20,
    outside_layers=20,
    layers=10,
    width=1,
    mlp_width=1,
    is_gated=True,
    heads=1,
    key_width=1,
    vocabulary=1,
)
CRITIC = replace(POLICY, parameters=60 + 7, outside_layers=7)
REWARD = replace(POLICY, parameters=300 + 50, outside_layers=50)

SIZE = PPOSize(
    policy=POLICY,
    critic=CRITIC,
    rewards=(REWARD,),
    processes=2,
    prompt_tokens=6,
    response_tokens=4,
    sampled_rows=8,
    trained_rows=3,
    trained_tokens=3 * 10,
)


@dataclass(frozen=True)
class ByParameter:
    """Seconds as counts of parameters; gathering counts 1,000 times, to tell both apart."""

    def gathering(self, parameters: ParameterCount) -> float:
        return 1_000 * (parameters.layers + parameters.outside)

    def reducing(self, parameters: ParameterCount) -> float:
        return parameters.layers + parameters.outside


def seconds(size: PPOSize, *, samples_here: bool = True) -> float:
    # 5 responses in a step, 3 in a pass: 2 passes.
    return ppo_exchange_seconds(
        size, ByParameter(), batch_rows=20, step_rows=5, steps=4, samples_here=samples_here
    )


LEARNING = 120 + 67
"""Parameters of policy and critic."""

AT_ONCE = 1_000 * (2 * LEARNING + 350 + 120)
"""Seconds in which models are gathered to sample and score."""


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("ddp", 4 * LEARNING),
        ("zero1", 4 * (LEARNING + 1_000 * LEARNING)),
        ("zero2", 4 * (2 * LEARNING + 1_000 * LEARNING)),
        # A pass gathers all weights; fsdp2 gathers the layers again. Sampling and the values gather
        # policy and critic; scoring gathers the reward model and the reference.
        ("zero3", 4 * 2 * 1_001 * LEARNING + AT_ONCE),
        ("fsdp2", 4 * 2 * (1_001 * LEARNING + 1_000 * 160) + AT_ONCE),
    ],
)
def test_the_exchange_time_of_an_update_is_that_by_hand(sharding, expected):
    assert seconds(replace(SIZE, sharding=sharding)) == expected


def test_a_large_model_is_gathered_for_both_passes_by_zero3():
    large = replace(POLICY, parameters=500_000_020)
    size = replace(SIZE, policy=large, critic=None, sharding="zero3")
    gathered = 4 * 2 * 2 * 500_000_020 + 3 * 500_000_020 + 350
    assert seconds(size) == 4 * 2 * 500_000_020 + 1_000 * gathered


@pytest.mark.parametrize("sharding", ["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_one_process_exchanges_nothing(sharding):
    assert seconds(replace(SIZE, sharding=sharding, processes=1)) == 0
    size = SupervisedSize(model=POLICY, writes=True, sharding=sharding, tokens=1)
    assert supervised_exchange_seconds(size, ByParameter(), passes=3, steps=5) == 0


def test_each_pass_gathers_the_layers_if_nothing_is_gathered_at_once():
    at_once = seconds(replace(SIZE, sharding="fsdp2"))
    one_by_one = seconds(replace(SIZE, sharding="fsdp2", gathers=False))
    # 3 batches of 8 responses, 4 tokens each: 12 passes to sample; 3 passes each of reward model,
    # reference and critic.
    layers = 12 * 100 + 3 * 300 + 3 * 100 + 3 * 60
    outside = 27 + 50 + 20 + 27
    assert one_by_one - at_once == 1_000 * (layers + outside) - AT_ONCE
    # If a server samples, the policy reads its 3 batches.
    read = replace(SIZE, sharding="fsdp2", gathers=False)
    assert one_by_one - seconds(read, samples_here=False) == 1_000 * 9 * 100
    # zero3 gathers what is outside the layers with them.
    at_once = seconds(replace(SIZE, sharding="zero3"))
    one_by_one = seconds(replace(SIZE, sharding="zero3", gathers=False))
    passes = 12 * 120 + 3 * 350 + 3 * 120 + 3 * 67
    assert one_by_one - at_once == 1_000 * passes - AT_ONCE


def test_of_an_adapter_only_its_gradients_are_sent_and_the_reference_is_its_base():
    shared = replace(SIZE, critic=None, adapter=9)
    assert seconds(replace(shared, sharding="ddp")) == 4 * 9
    assert seconds(replace(shared, sharding="zero1")) == 4 * 1_001 * 9
    expected = 4 * 2 * (9 + 1_000 * 220) + 1_000 * (3 * 120 + 350)
    assert seconds(replace(shared, sharding="fsdp2")) == expected
    # A base in bfloat16 is half as many bytes.
    half = 4 * 2 * (9 + 1_000 * 110) + 1_000 * (3 * 60 + 350)
    assert seconds(replace(shared, sharding="fsdp2", base_bytes=2)) == half


def test_the_exchange_time_of_a_supervised_training_is_that_by_hand():
    size = SupervisedSize(model=POLICY, writes=True, processes=2, sharding="zero2", tokens=1)

    def of(size: SupervisedSize) -> float:
        return supervised_exchange_seconds(size, ByParameter(), passes=3, steps=5)

    assert of(size) == 5 * (3 * 120 + 1_000 * 120)
    assert of(replace(size, sharding="fsdp2")) == 5 * 3 * (120 + 1_000 * 220)
    assert of(replace(size, adapter=9)) == 5 * (3 * 9 + 1_000 * 9)


def test_gpus_send_over_their_links_and_machines_over_the_network():
    h100 = read_gpus(HardwareConfig())["h100-80gb"]
    eight = TableSpeed(gpu=h100, autocast=True, processes=8, machines=1, sharding="fsdp2")
    sixteen = replace(eight, processes=16, machines=2)
    parameters = ParameterCount(3e9, 1e9)
    # 7 of 8 parts of 16 GB at 450 GB/s, and 15 of 16 at 400.
    assert eight.gathering(parameters) == pytest.approx(14 / (LINK_SHARE * 450))
    assert sixteen.reducing(parameters) == pytest.approx(15 / (LINK_SHARE * 400))
    # An all-reduce is twice a reduce-scatter.
    for kind in ("ddp", "zero1", "zero2"):
        all_reduced = replace(eight, sharding=kind)
        assert all_reduced.reducing(parameters) == pytest.approx(28 / (LINK_SHARE * 450))
    slower = replace(sixteen, gpu=replace(h100, link=100e9))
    assert slower.gathering(parameters) == pytest.approx(15 / (LINK_SHARE * 100))


def test_passes_measured_at_two_depths_are_extrapolated_to_all_layers():
    def passes(layers: int, gathering: float, exchange: float) -> PassSeconds:
        return PassSeconds(
            layers=layers,
            scoring=1 + 2 * layers,
            updating=3 + 4 * layers,
            drawing=5 + 6 * layers,
            gathering=gathering,
            exchange=exchange,
        )

    # Gathering takes 2 s and 3 s for each layer. A pass gathers the layers twice, and reduces
    # gradients in 5 s and 7 s for each layer.
    found = FoundSpeed(passes=[passes(1, 5, 7 + 13), passes(3, 11, 7 + 39)], adam=0.0)
    speed = MeasuredSpeed.of(found, replace(SIZE, sharding="fsdp2"))
    assert speed.scoring == LinearCost(outside=1, layer=2)
    assert speed.updating == LinearCost(outside=3, layer=4)
    assert speed.drawing == LinearCost(outside=5, layer=6)
    assert speed.gathered == LinearCost(outside=2, layer=3)
    assert speed.reduced == LinearCost(outside=5, layer=7)
    # The reward model has 30 layers like those of the policy, and 2.5 times as much outside.
    assert speed.gathering(ParameterCount.of(REWARD)) == pytest.approx(2.5 * 2 + 30 * 3)
    # zero3 gathers small models once, and without sharded weights a pass only reduces.
    speed = MeasuredSpeed.of(found, replace(SIZE, sharding="zero3"))
    assert speed.reduced == LinearCost(outside=5, layer=10)
    speed = MeasuredSpeed.of(found, replace(SIZE, sharding="ddp"))
    assert speed.reduced == LinearCost(outside=7, layer=13)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    ["fsdp2", "ddp", "zero1", "zero2", "zero3"],
)
def test_two_processes_measure_positive_times(sharding, tmp_path, capfd):
    # As models of the hub are saved. A training has them in fp32.
    model = make_policy().bfloat16()
    model.save_pretrained(tmp_path)
    size = replace(SIZE, policy=model_size(model), sharding=sharding, on_cpu=True)
    speed = measure_speed(str(tmp_path), size)
    weights = ParameterCount.of(size.policy)
    assert (speed.gathering(weights) > 0) == (sharding != "ddp")
    assert 0 < speed.reducing(weights) + speed.gathering(weights) < 1
    # 30 tokens in a pass forward and backward, which takes some milliseconds.
    trained = speed.training(size.policy, 30, 12, Backward(recomputes=False, is_frozen=False))
    assert 1e-4 < trained < 0.5
    # Not compared with `trained`: on a busy machine, a forward pass can take longer.
    assert 0 < speed.forward(size.policy, 30, 12) < 0.5
    assert 0 < speed.decoding(size.policy) < 0.5
    assert 0 < speed.adam < 1e-6
    shown = capfd.readouterr().err
    assert re.search(rf"timing this machine \(fp32, {sharding}\): [1-9]\d* pass, ", shown)


@pytest.mark.slow
def test_a_model_of_text_and_images_has_a_measured_speed(tmp_path):
    model = Mistral3ForConditionalGeneration._from_config(small_config("mistral3"))
    model.save_pretrained(tmp_path)
    size = replace(SIZE, policy=model_size(model), sharding="none", processes=1, on_cpu=True)
    assert measure_speed(str(tmp_path), size).decoding(size.policy) > 0


def test_a_policy_that_cannot_be_measured_here_is_refused():
    large = replace(POLICY, parameters=10**10)
    with pytest.raises(ModelError, match="With two of its layers, the policy has more than 500,00"):
        measure_speed("unused", replace(SIZE, on_cpu=True, policy=large))
    with pytest.raises(ProcessError, match="1000 processes need a GPU each, and this machine has"):
        measure_speed("unused", replace(SIZE, processes=1_000))
