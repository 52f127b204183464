"""The table of memory, what is recommended, and the time and price of the trainings."""

from dataclasses import replace

import pytest

from pipeline.launch.gpu_table import read_gpus
from pipeline.preflight.sizes.memory_table import choices, recommended
from pipeline.preflight.sizes.run_size import describe_run, measure_run
from pipeline.preflight.sizes.run_time import PEAK_SHARE, TableSpeed, ppo_seconds
from pipeline.settings.hardware_config import HardwareConfig
from pipeline.settings.settings import make_settings
from ppo_core.errors import ConfigError
from ppo_core.ppo.schedule import Schedule
from tests.helpers.paths import ROOT
from tests.helpers.pipeline_inputs import tiny_table
from tests.helpers.published_sizes import LLAMA, table, trainings

H100 = read_gpus(HardwareConfig())["h100-80gb"]


@pytest.mark.parametrize("name", LLAMA)
def test_the_page_has_the_table_that_is_computed(name: str):
    """Print the tables by `python -m tests.helpers.published_sizes`."""
    page = (ROOT / "docs" / "cost.md").read_text()
    for line in table(name).splitlines():
        assert line.strip() in page


def test_the_fastest_way_that_fits_is_recommended_with_the_method_of_the_run():
    sft, _, ppo = trainings(LLAMA["8B"][0])
    # In bfloat16, zero2 fits and sends less than zero3 and fsdp2.
    chosen = recommended(sft, H100.usable, on_gpus=True)
    assert chosen is not None
    assert (chosen.lora, chosen.bf16, chosen.sharding) == (False, True, "zero2")
    assert chosen.as_settings() == '[sft]\nsharding = "zero2"\nbf16 = true'
    of_ppo = recommended(ppo, H100.usable, on_gpus=True)
    assert of_ppo is not None
    assert of_ppo.memory.total <= H100.usable
    # Of an adapter, more is possible.
    adapted = replace(ppo, size=replace(ppo.size, adapter=ppo.adapter))
    lora = recommended(adapted, H100.usable, on_gpus=True)
    assert lora is not None
    assert (lora.lora, lora.sharding) == (True, "ddp")
    assert lora.as_settings() == (
        '[ppo]\nsharding = "ddp"\nbf16 = true\n[lora]\nr = 16\ndtype = "bfloat16"'
    )


def test_another_method_is_recommended_if_none_fits_and_nothing_if_that_does_not_either():
    sft = trainings(LLAMA["70B"][0])[0]
    chosen = recommended(sft, 80 * 2**30, on_gpus=True)
    assert chosen is not None
    assert chosen.lora
    assert recommended(sft, H100.usable // 2, on_gpus=True) is None


def test_what_is_set_is_one_of_the_choices():
    for training in trainings(LLAMA["1B"][0]):
        (found,) = [each for each in choices(training, on_gpus=True) if each.is_set]
        assert (found.lora, found.bf16, found.sharding) == (False, True, "fsdp2")


def test_the_time_of_ppo_on_a_gpu_by_hand():
    ppo = trainings(LLAMA["8B"][0])[2].size
    schedule = Schedule(batch_size=64, num_updates=10, steps_per_update=4)
    speed = TableSpeed(gpu=H100, autocast=True, recomputes=False)
    seconds = ppo_seconds(ppo, schedule, speed, epochs=2, mean_prompt=512)
    # Eight responses of 512 tokens to prompts of 512 on each of 8 GPUs: 8192 tokens. Layers have
    # 6,979,584,000 weights, the head 525,336,576, the reward model 6,979,584,000 in its layers.
    operations, bandwidth = PEAK_SHARE * 989e12, PEAK_SHARE * 3350e9
    layers, head = 6_979_584_000, 525_336_576
    read = 2 * (layers * 8 * 512 + head * 8) / operations
    drawn = 512 * 2 * (layers + head) / bandwidth
    policy = 2 * (layers * 8192 + head * 4096) / operations
    reward = 2 * layers * 8192 / operations
    adam = 4 * 4 * 7 * (8_030_261_248 + 4_096) / 8 / bandwidth
    expected = 10 * (read + drawn + policy + reward + 2 * 3 * policy + adam)
    assert seconds == pytest.approx(expected)
    faster = replace(H100, bf16=2 * 989e12, bandwidth=2 * 3350e9)
    twice = TableSpeed(gpu=faster, autocast=True, recomputes=False)
    assert ppo_seconds(ppo, schedule, twice, epochs=2, mean_prompt=512) < 0.6 * seconds


def test_a_laptop_checks_for_a_cluster(tmp_path):
    table = tiny_table(tmp_path) | {"processes": 8, "hardware": {"gpu": "h100-80gb"}}
    words = describe_run(measure_run(make_settings(table, {}), has_champion=False, with_cost=True))
    assert "Memory per GPU (h100-80gb) in GiB" in words
    assert "processes 8" in words
    assert "on 8 x h100-80gb; price: about 0.00 US dollars at 6.88 per GPU and hour" in words
    assert "main memory: about " in words
    assert "cheapest of the table: 1 x " in words
    cheaper = table | {
        "hardware": {"gpu": "h100-80gb", "gpus": {"h100-80gb": {"price_per_hour": 2.5}}}
    }
    words = describe_run(
        measure_run(make_settings(cheaper, {}), has_champion=False, with_cost=True)
    )
    assert "at 2.5 per GPU and hour" in words


def test_a_misspelt_gpu_is_refused(tmp_path):
    table = tiny_table(tmp_path) | {"hardware": {"gpu": "h100"}, "processes": 8}
    with pytest.raises(ConfigError, match=r"hardware\.gpu='h100' is unknown"):
        measure_run(make_settings(table, {}), has_champion=False, with_cost=True)
