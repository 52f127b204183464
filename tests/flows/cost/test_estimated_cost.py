"""The table of memory, what is recommended, and the time and price of the trainings."""

import re
from dataclasses import replace

import psutil
import pytest

from pipeline.cost.gpu_table import read_gpus
from pipeline.cost.measured_speed import LinearCost, MeasuredSpeed
from pipeline.cost.memory.ppo_memory import PPOSize
from pipeline.cost.memory.sizes import BF16, FP32
from pipeline.cost.memory_table import choices, memory_of, recommended
from pipeline.cost.run_size import describe_memory, describe_time, measure_run
from pipeline.cost.run_time import (
    LINK_SHARE,
    PEAK_SHARE,
    Backward,
    TableSpeed,
    ppo_seconds,
    supervised_seconds,
)
from pipeline.cost.training_sizes import Processes, _without_head, ppo_size
from pipeline.settings.hardware_config import HardwareConfig
from pipeline.settings.make_settings import make_settings
from ppo_core.config import placement
from ppo_core.errors import ConfigError
from ppo_core.models.loading import load_policy
from ppo_core.ppo.schedule import Schedule, make_schedule
from ppo_core.supervised import step_order
from ppo_core.training.model_setup import trains_in_bf16
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model, write_rows
from tests.helpers.models.published_sizes import LLAMA, table, trainings
from tests.helpers.paths import ROOT

H100 = read_gpus(HardwareConfig())["h100-80gb"]


@pytest.mark.parametrize("name", LLAMA)
def test_the_page_has_the_table_that_is_computed(name: str, monkeypatch):
    """Print the tables by `python -m tests.helpers.models.published_sizes`."""
    monkeypatch.setenv("FORCE_COLOR", "1")
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
        '[ppo]\nsharding = "ddp"\nbf16 = true\n[lora]\ndtype = "bfloat16"'
    )


def test_another_method_is_recommended_if_none_fits_and_nothing_if_that_does_not_either():
    sft = trainings(LLAMA["70B"][0])[0]
    chosen = recommended(sft, 80 * 2**30, on_gpus=True)
    assert chosen is not None
    assert chosen.lora
    assert chosen.as_settings().endswith("\n[sft.lora]\nr = 16")
    assert recommended(sft, H100.usable // 2, on_gpus=True) is None


def test_a_critic_on_the_policys_backbone_is_recommended_before_another_method():
    """The size of Qwen2.5-0.5B on a GPU of 24 GB, in small: only the critic is too much."""
    ppo = trainings(LLAMA["1B"][0])[2]
    one = replace(ppo.size, processes=1, sharding="none")
    shared = replace(ppo, size=one)
    alone = replace(ppo, size=replace(one, critic=one.policy))
    needed = memory_of(shared.size).total
    assert needed < memory_of(alone.size).total
    chosen = recommended(alone, needed, on_gpus=True)
    assert chosen is not None
    assert (chosen.lora, chosen.bf16, chosen.shares_critic) == (False, True, True)
    assert chosen.memory.total == needed
    assert chosen.as_settings() == "[ppo]\nbf16 = true\nshared_critic = true"
    # Where the critic of its own fits, it stays.
    roomy = recommended(alone, memory_of(alone.size).total, on_gpus=True)
    assert roomy is not None
    assert not roomy.shares_critic
    # A run that has none is recommended none.
    assert not recommended(shared, needed, on_gpus=True).shares_critic
    # LoRA with a shared critic comes before nothing at all.
    tiny = recommended(alone, needed // 3, on_gpus=True)
    assert tiny is not None
    assert tiny.lora


def test_what_is_set_is_one_of_the_choices():
    for training in trainings(LLAMA["1B"][0]):
        (found,) = [each for each in choices(training, on_gpus=True) if each.is_set]
        assert (found.lora, found.bf16, found.sharding) == (False, True, "fsdp2")


@pytest.mark.parametrize("base", [FP32, BF16])
def test_the_choice_that_is_set_has_the_precision_under_the_adapters_that_is_set(base: int):
    ppo = trainings(LLAMA["1B"][0])[2]
    adapted = replace(ppo, size=replace(ppo.size, adapter=ppo.adapter, base_bytes=base))
    (found,) = [each for each in choices(adapted, on_gpus=True) if each.is_set]
    assert (found.lora, found.bf16) == (True, True)
    assert found.memory == memory_of(adapted.size)


def test_the_time_of_ppo_on_a_gpu_by_hand():
    ppo = trainings(LLAMA["8B"][0])[2].size
    schedule = Schedule(batch_size=64, num_updates=10, steps_per_update=4)
    speed = TableSpeed(gpu=H100, autocast=True, processes=8, machines=1, sharding="fsdp2")
    ppo = replace(ppo, recomputes=False)

    def seconds_of(size, speed=speed, samples_here=True) -> float:
        return ppo_seconds(
            size, schedule, speed, epochs=2, mean_prompt=512, samples_here=samples_here
        )

    seconds = seconds_of(ppo)
    # Eight responses of 512 tokens to prompts of 512 on each of 8 GPUs: 8192 tokens. Layers have
    # 6,979,584,000 weights, the head 525,336,576, the reward model 6,979,584,000 in its layers.
    operations, bandwidth = PEAK_SHARE * 989e12, PEAK_SHARE * 3350e9
    layers, head = 6_979_584_000, 525_336_576
    read = 2 * (layers * 8 * 512 + head * 8) / operations
    # Decoding launches the kernels of 32 layers for each token; reading the weights is faster.
    drawn = 512 * 32 / (49.94 * 24)
    policy = 2 * (layers * 8192 + head * 4096) / operations
    reward = 2 * layers * 8192 / operations
    adam = 4 * 4 * 7 * (8_030_261_248 + 4_096) / 8 / bandwidth
    # 4 steps of 2 passes of 2 responses. A pass gathers all weights, and the layers again, and
    # reduces all gradients. Sampling, reference and values gather the policy, the reward model its
    # own weights.
    all_weights, reward_weights = 8_030_261_248, layers + 1_050_677_248 - head + 4_096
    sent = 4 * 2 * (2 * all_weights + layers) + 3 * all_weights + reward_weights
    exchange = 4 * sent * 7 / 8 / (LINK_SHARE * 450e9)
    expected = 10 * (read + drawn + policy + reward + 2 * 3 * policy + adam + exchange)
    assert seconds == pytest.approx(expected)
    # Recomputed are the layers only, as many operations as the reward model's.
    recomputed = seconds_of(replace(ppo, recomputes=True))
    assert recomputed == pytest.approx(expected + 10 * 2 * reward)
    # A frozen base has no gradients of weights. The adapter has 1,000 parameters.
    adapted = replace(ppo, adapter=1_000)
    unsent = 4 * 4 * 2 * (all_weights - 1_000) * 7 / 8 / (LINK_SHARE * 450e9)
    fewer = 10 * (2 * policy + adam * (1 - (1_000 + 4_096) / (all_weights + 4_096)) + unsent)
    assert seconds_of(adapted) == pytest.approx(expected - fewer)
    # A server samples, and the policy reads the sequences.
    elsewhere = seconds_of(ppo, samples_here=False)
    assert elsewhere == pytest.approx(expected + 10 * (policy - read - drawn))
    # A GPU of twice the speed launches kernels no faster.
    faster = replace(H100, bf16=2 * 989e12, bandwidth=2 * 3350e9, link=2 * 450e9)
    halved = (seconds - 10 * drawn) / 2 + 10 * drawn
    assert seconds_of(ppo, replace(speed, gpu=faster)) == pytest.approx(halved)


def test_only_tokens_with_a_loss_meet_the_head_in_sft():
    size = trainings(LLAMA["8B"][0])[0].size
    speed = TableSpeed(gpu=H100, autocast=True, processes=8, machines=1, sharding="fsdp2")

    def seconds(counted: int) -> float:
        given = {"tokens": 8 * 10**6, "optimizer_steps": 1, "passes": 1.0}
        return supervised_seconds(size, speed, counted=counted, **given)

    # A million tokens of a GPU, 525,336,576 weights, forward and twice as much backward.
    head = 3 * 2 * 10**6 * 525_336_576 / (PEAK_SHARE * 989e12)
    assert seconds(8 * 10**6) - seconds(0) == pytest.approx(head)


def test_the_counted_tokens_and_the_passes_of_a_supervised_training_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(step_order, "TOKENS_ON_CPU", 50)
    prompt, words = "w1 w2 w3", " ".join(["w4"] * 16)
    rows = [{"prompt": prompt, "completion": words}] * 8
    table = tiny_table(tmp_path) | {"sft_data": write_rows(tmp_path / "long.jsonl", rows)}
    table["sft"] = table["sft"] | {"batch_size": 8}
    sft = measure_run(make_settings(table, {}), has_champion=False).sft
    # The end-of-sequence token is the 17th of a completion.
    assert sft is not None
    assert (sft.tokens, sft.counted) == (8 * 20, 8 * 17)

    def passes(processes: int, *, on_cpu: bool) -> float:
        size = trainings(LLAMA["1B"][0])[0].size
        return sft.passes(8, replace(size, on_cpu=on_cpu, processes=processes))

    # A pass has two rows of a process, and 4 of two processes; on a GPU the batch is one pass.
    assert (passes(1, on_cpu=True), passes(2, on_cpu=True), passes(1, on_cpu=False)) == (4, 2, 1)


def test_decoding_is_bound_by_launches_or_by_the_memory_by_hand():
    def milliseconds(name: str, parameters: int, layers: int, *, autocast: bool = True) -> float:
        gpu = read_gpus(HardwareConfig())[name]
        speed = TableSpeed(gpu=gpu, autocast=autocast, processes=1, machines=1, sharding="none")
        # Without embeddings all parameters are multiplied.
        model = replace(
            LLAMA["1B"][0], layers=layers, parameters=parameters, outside_layers=0, width=0
        )
        return 1000 * speed.decoding(model)

    # Published: 1000 / 49.94 = 20.0 ms a token for 24 layers, on an A100.
    for gpu in ("a100-80gb", "h100-80gb", "l4-24gb"):
        assert milliseconds(gpu, 494_000_000, 24) == pytest.approx(20.02, abs=0.01)
    # Half the layers launch half as many kernels.
    assert milliseconds("h100-80gb", 494_000_000, 12) == pytest.approx(10.01, abs=0.01)
    # 7.6 billion weights: 15.2 GB at 0.4 x 300 GB/s; in fp32 twice as many bytes.
    assert milliseconds("l4-24gb", 7_600_000_000, 28) == pytest.approx(126.7, abs=0.1)
    assert milliseconds("l4-24gb", 7_600_000_000, 28, autocast=False) == pytest.approx(
        253.3, abs=0.1
    )
    # On an H100 the same are 11.3 ms to read, and 28 layers take 23.4 ms to launch.
    assert milliseconds("h100-80gb", 7_600_000_000, 28) == pytest.approx(23.36, abs=0.01)


def test_no_pass_is_shorter_than_its_launches_by_hand():
    """A small model on an H100: what the GPU computes is less than what Python launches."""
    one = replace(trainings(LLAMA["1B"][0])[2].size, processes=1, sharding="none")
    small = replace(LLAMA["1B"][0], layers=10, parameters=1_000_000, outside_layers=0, width=8)
    size = replace(
        one,
        policy=small,
        rewards=(small,),
        critic=small,
        recomputes=True,
        prompt_tokens=8,
        response_tokens=8,
        sampled_rows=16,
        trained_tokens=32,
    )
    schedule = Schedule(batch_size=64, num_updates=5, steps_per_update=4)
    speed = TableSpeed(gpu=H100, autocast=True, processes=1, machines=1, sharding="none")
    seconds = ppo_seconds(size, schedule, speed, epochs=3, mean_prompt=8, samples_here=True)
    # 10 layers of 1 / (49.94 x 24) s. 4 batches of 16 rows: reading prompts, 8 tokens, and scoring
    # by three models. 3 epochs of 32 passes of 2 rows, each forward, recomputed and backward, of
    # policy and critic.
    launched = 10 / (49.94 * 24)
    expected = 5 * launched * (4 + 4 * 8 + 3 * 4 + 3 * 32 * 3 * 2)
    assert seconds == pytest.approx(expected, rel=1e-3)


def test_the_measured_speed_counts_frozen_weights_and_recomputed_layers_by_hand():
    model = LLAMA["1B"][0]
    speed = MeasuredSpeed(
        model=model,
        scoring=LinearCost(outside=1.0, layer=2.0),
        updating=LinearCost(outside=3.0, layer=6.0),
        drawing=LinearCost(outside=0.0, layer=0.0),
        gathered=LinearCost(outside=0.0, layer=0.0),
        reduced=LinearCost(outside=0.0, layer=0.0),
        answered=0.5,
        adam=0.0,
    )

    def seconds(*, recomputes: bool, is_frozen: bool) -> float:
        backward = Backward(recomputes=recomputes, is_frozen=is_frozen)
        return speed.training(model, tokens=10, logit_tokens=5, backward=backward)

    # 22 layers, 10 tokens, of which half have logits as in the measurement.
    forward, both = 1 * 10 + 2 * 22 * 10, 3 * 10 + 6 * 22 * 10
    assert seconds(recomputes=False, is_frozen=False) == pytest.approx(both, rel=1e-4)
    # Half of the backward pass is left out.
    frozen = both - (both - forward) / 2
    assert seconds(recomputes=False, is_frozen=True) == pytest.approx(frozen, rel=1e-4)
    assert seconds(recomputes=True, is_frozen=True) == pytest.approx(frozen + 2 * 22 * 10, rel=1e-4)


def test_a_laptop_checks_for_a_cluster(tmp_path):
    table = tiny_table(tmp_path) | {"processes": 8, "hardware": {"gpu": "h100-80gb"}}
    words = cost_lines(table)
    assert "Memory per GPU (h100-80gb) in GiB" in words
    assert "on 8 x h100-80gb; price: about 0.00 US dollars at 6.88 per GPU and hour" in words
    assert "main memory: about " in words
    assert "cheapest of the table: 1 x " in words
    # Two layers, at 0.83 ms each.
    assert "\nassumed: 1.7 ms to sample one token of each of " in words
    assert "at least 0.83 ms, because Python launches its kernels" in words
    cheaper = table | {
        "hardware": {"gpu": "h100-80gb", "gpus": {"h100-80gb": {"price_per_hour": 2.5}}}
    }
    assert "at 2.5 per GPU and hour" in cost_lines(cheaper)


def cost_lines(table: dict) -> str:
    settings = make_settings(table, {})
    size = measure_run(settings, has_champion=False)
    return f"{describe_memory(size, settings)}\n{describe_time(size, settings)}"


def test_the_cheapest_gpus_are_of_one_machine_and_share_the_batches(tmp_path):
    table = tiny_table(tmp_path) | {"processes": 4, "num_nodes": 2}
    hardware = {"gpu": "h100-80gb", "gpus": {"h100-80gb": {"price_per_hour": 0.001}}}
    words = cost_lines(table | {"hardware": hardware})
    assert "cheapest of the table: 1 x h100-80gb" in words
    assert "with\nnum_nodes = 1\nprocesses = 1\n" in words
    # 4 of the 8 processes are on each machine.
    at_once = re.search(r"main memory: about (\d+) GiB per machine", words)
    assert at_once is not None
    assert int(at_once[1]) == 3
    # A batch of 4 responses is none for 8 processes, and 1 or 2 are still compared.
    few = tiny_table(tmp_path) | {"processes": 2, "hardware": hardware}
    few["ppo"] = few["ppo"] | {"batch_size": 4, "num_mini_batches": 1}
    assert "cheapest of the table: 1 x " in cost_lines(few)


def test_a_gpu_without_speeds_says_which_are_missing(tmp_path):
    mine = {"memory_gib": 24.0, "gb_per_second": 600.0}
    table = tiny_table(tmp_path) | {"processes": 1}
    words = cost_lines(table | {"hardware": {"gpu": "mine", "gpus": {"mine": mine}}})
    assert "because [hardware.gpus.mine] lacks bf16_tflops, fp32_tflops." in words


def test_the_time_is_without_sampling_if_a_server_samples(tmp_path):
    table = tiny_table(tmp_path) | {"processes": 1, "hardware": {"gpu": "h100-80gb"}}
    server = {"use_vllm": True, "vllm_weights_dir": str(tmp_path / "weights")}
    words = cost_lines(table | {"ppo": table["ppo"] | server})
    assert "full length, without sampling, which the vLLM server does, on 1 x h100-80gb" in words


def test_the_precision_of_the_check_is_that_of_the_training(tmp_path, monkeypatch):
    table = tiny_table(tmp_path)
    here, elsewhere = (Processes(number=1, on_gpus=on_gpus) for on_gpus in (False, True))

    def computes_in_bf16(processes: Processes, **changes) -> bool:
        settings = make_settings(table | changes, {})
        schedule = make_schedule(settings.ppo, num_prompts=8, num_processes=1)
        size = ppo_size(settings, schedule, longest_prompt=8, processes=processes)
        assert size is not None
        # What the trainer does with the same policy.
        if not processes.on_gpus:
            policy = load_policy(settings.policy)
            expected = trains_in_bf16(settings.ppo.bf16, policy, use_cpu=True)
            assert size.autocast == expected
        return size.autocast

    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    assert not computes_in_bf16(here)
    monkeypatch.setattr("ppo_core.config.placement.SMALLEST_WIDTH", 8)
    assert computes_in_bf16(here)
    assert not computes_in_bf16(here, ppo=table["ppo"] | {"bf16": False})
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    assert not computes_in_bf16(here)
    assert computes_in_bf16(elsewhere, hardware={"gpu": "h100-80gb"})


def test_a_running_average_needs_full_weights():
    ppo = trainings(LLAMA["1B"][0])[2]
    averaging = replace(ppo, size=replace(ppo.size, averages=True, sharding="ddp"))
    kinds = {choice.sharding for choice in choices(averaging, on_gpus=True)}
    assert kinds == {"ddp", "zero1", "zero2"}


def test_a_misspelt_gpu_is_refused(tmp_path):
    table = tiny_table(tmp_path) | {"hardware": {"gpu": "h100"}, "processes": 8}
    with pytest.raises(ConfigError, match=r"hardware\.gpu='h100' is unknown"):
        measure_run(make_settings(table, {}), has_champion=False)


def test_the_time_is_not_measured_where_a_training_does_not_fit(tmp_path):
    # Each of so many processes needs more for its libraries than its share of the main memory.
    number = psutil.virtual_memory().total // 2**29
    table = tiny_table(tmp_path) | {"processes": number}
    table["ppo"] = table["ppo"] | {"batch_size": number, "total_episodes": number}
    words = cost_lines(table)
    assert "time: not computed. Without a GPU of known speed, this machine is timed" in words
    assert "Memory per process in GiB" in words


def test_a_container_has_no_more_memory_than_its_limit(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    monkeypatch.setattr(placement, "_CONTAINER", tmp_path)
    settings = make_settings(tiny_table(tmp_path) | {"processes": 2}, {})
    words = describe_memory(measure_run(settings, has_champion=False), settings)
    assert "Memory per process in GiB, 0.5 usable" in words


def test_without_time_to_measure_only_time_and_price_are_unknown(tmp_path, monkeypatch):
    def processes() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    before = processes()
    monkeypatch.setattr("pipeline.cost.estimated_cost.MAX_SECONDS", 0.5)
    words = cost_lines(tiny_table(tmp_path) | {"processes": 2})
    assert "Memory per process in GiB" in words
    (line,) = (line for line in words.splitlines() if line.startswith("time:"))
    assert re.search("not computed, .* longer than 180 s, so time and price are unknown", line)
    assert "Set hardware.gpu to a GPU whose speeds are known." in line
    assert processes() <= before


@pytest.mark.slow
def test_a_measured_time_of_several_machines_says_what_it_leaves_out(tmp_path):
    words = cost_lines(tiny_table(tmp_path) | {"processes": 1, "num_nodes": 2})
    assert "full length, without the exchange between machines, on this machine" in words


def test_every_reward_model_counts_and_the_critic_copies_one_that_has_a_weight(tmp_path):
    table = tiny_table(tmp_path)
    model = write_model(tmp_path / "other", labels=1)
    here = Processes(number=1, on_gpus=False)

    def size_of(*rewards: str, **ppo: object) -> PPOSize:
        settings = make_settings(table | {"rewards": [*rewards], "ppo": table["ppo"] | ppo}, {})
        schedule = make_schedule(settings.ppo, num_prompts=8, num_processes=1)
        return ppo_size(settings, schedule, longest_prompt=8, processes=here)

    alone = size_of()
    (own,) = alone.rewards
    assert size_of("reward-model") == alone
    several = size_of("reward-model", f"reward-model:{model}", "python:rewards.py:f")
    assert several == replace(alone, rewards=(own, own))
    # The trainer copies the policy's backbone where no reward model with a weight reads along.
    functions = size_of("reward-model", "python:rewards.py:f", reward_weights=[0.0, 1.0])
    assert functions.critic == _without_head(functions.policy)
    other = size_of("reward-model", f"reward-model:{model}", reward_weights=[0.0, 1.0])
    assert other.critic == other.rewards[1] == alone.critic
    # PPO does not load the run's own reward model if `rewards` leaves it out.
    without = size_of("python:rewards.py:f")
    assert without == replace(alone, rewards=(), critic=_without_head(alone.policy))
    assert memory_of(without).total < memory_of(alone).total
    # Members of the reward model, and a language model that scores in the same process.
    table["reward_model_training"] = {**table["reward_model_training"], "members": 3}
    table["rewards_rubric"] = "rubric.md"
    many = size_of("reward-model", f"transformers:{table['policy']}")
    assert many == replace(alone, rewards=(own, own, own, alone.policy))
