"""GPUs by name, with the settings' numbers in the place of the table's."""

import math

import pytest

from pipeline.cost import gpu_table
from pipeline.cost.gpu_table import (
    Gpu,
    find_gpu,
    price_per_hour,
    processes_on_a_machine,
    read_gpus,
)
from pipeline.launch.commands import FoundGpu
from pipeline.settings.hardware_config import HardwareConfig
from pipeline.settings.make_settings import make_settings
from ppo_core.errors import ConfigError
from tests.helpers.inputs.pipeline_inputs import tiny_table


def test_the_table_has_all_numbers_of_every_gpu():
    gpus = read_gpus(HardwareConfig())
    assert {"l4-24gb", "a100-80gb", "h100-80gb"} <= gpus.keys()
    for gpu in gpus.values():
        assert None not in (gpu.bf16, gpu.fp32, gpu.bandwidth, gpu.price)
        assert gpu.fp32 < gpu.bf16
    h100 = gpus["h100-80gb"]
    # A tenth of 79.2 GiB stays free.
    assert h100.memory == int(79.2 * 2**30)
    assert h100.usable == int(0.9 * h100.memory)


def test_the_settings_replace_a_price_and_add_a_gpu():
    config = HardwareConfig(
        gpu="b200",
        gpus={"h100-80gb": {"price_per_hour": 2.5}, "b200": {"memory_gib": 178}},
    )
    gpus = read_gpus(config)
    assert (gpus["h100-80gb"].price, gpus["h100-80gb"].memory) == (2.5, int(79.2 * 2**30))
    assert find_gpu(config) == gpus["b200"]
    assert (gpus["b200"].price, gpus["b200"].memory) == (None, 178 * 2**30)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
    ],
)
def test_a_gpu_of_this_machine_is_known_by_its_name(found: str, name: str, monkeypatch):
    gpus = (FoundGpu(found, 10**10),)
    monkeypatch.setattr(gpu_table, "found_gpus", lambda: gpus)
    config = HardwareConfig()
    assert find_gpu(config) == read_gpus(config)[name]
    assert price_per_hour(gpus[0], read_gpus(config), "") == read_gpus(config)[name].price
    # A name in the settings does not change what a step has used.
    assert price_per_hour(gpus[0], read_gpus(config), "h200-141gb") == read_gpus(config)[name].price


def test_a_gpu_that_the_table_lacks_has_its_own_memory_and_no_price(monkeypatch):
    found = FoundGpu("NVIDIA GeForce RTX 4090", 24 * 2**30)
    monkeypatch.setattr(gpu_table, "found_gpus", lambda: (found,))
    gpu = find_gpu(HardwareConfig())
    assert gpu is not None
    assert (gpu.name, gpu.memory, gpu.price) == (found.name, found.memory, None)
    assert price_per_hour(found, read_gpus(HardwareConfig()), "") is None
    # Somebody who names the GPU says what it costs.
    named = HardwareConfig(gpu="mine", gpus={"mine": {"memory_gib": 24, "price_per_hour": 0.4}})
    assert price_per_hour(found, read_gpus(named), named.gpu) == 0.4


@pytest.mark.parametrize(
    "name", ["NVIDIA L40", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
)
def test_another_gpu_with_the_beginning_of_a_known_name_is_unknown(name: str, monkeypatch):
    found = FoundGpu(name, 5 * 2**30)
    monkeypatch.setattr(gpu_table, "found_gpus", lambda: (found,))
    assert find_gpu(HardwareConfig()) == Gpu(name=name, memory=5 * 2**30)
    assert price_per_hour(found, read_gpus(HardwareConfig()), "") is None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"gpu": "h1000"}, "hardware.gpu='h1000' is unknown. Known are l4-24gb,"),
        ({"gpus": {"mine": {"price_per_hour": 1.0}}}, r"\[hardware.gpus.mine\] .* memory_gib"),
    ],
)
def test_a_gpu_that_nobody_knows_is_refused(table: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        find_gpu(HardwareConfig(**table))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"gpus": {"h100-80gb": {"price": 2.0}}},
            "h100-80gb.price is not a property of a GPU",
        ),
        ({"gpus": {"h100-80gb": {"price_per_hour": 0.0}}}, "must be a finite number above 0"),
        ({"judge_prices": {"openai:gpt": -1.0}}, "judge_prices.openai:gpt=-1.0 must be"),
        ({"judge_prices": {"openai:gpt": math.inf}}, "judge_prices.openai:gpt=inf must be"),
    ],
)
def test_a_wrong_number_is_refused(table: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        HardwareConfig(**table)


def test_a_named_gpu_needs_their_number(tmp_path):
    table = tiny_table(tmp_path) | {"hardware": {"gpu": "h100-80gb"}}
    with pytest.raises(ConfigError, match="Set processes to the number of GPUs"):
        processes_on_a_machine(make_settings(table, {}))
    assert processes_on_a_machine(make_settings(table | {"processes": 8}, {})) == 8


@pytest.mark.parametrize("judge", ["openai:gpt-4o", "rule", ""])
def test_a_price_of_no_judge_of_the_run_is_refused(judge: str, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    table = tiny_table(tmp_path) | {"judge": judge}
    prices = {"hardware": {"judge_prices": {"openai:gpt-4o-mini": 0.0003}}}
    with pytest.raises(ConfigError, match=r"judge_prices\.'openai:gpt-4o-mini' would be ignored"):
        make_settings(table | prices, {})
    labeler = {"count": 4, "labeller": "openai:gpt-4o-mini"}
    for named in ({"judge": "rule, openai:gpt-4o-mini"}, {"fresh_pairs": labeler}):
        both = make_settings(table | prices | named, {})
        assert both.hardware.judge_prices == {"openai:gpt-4o-mini": 0.0003}
