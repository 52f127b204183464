"""Estimate memory, time and price of a run's trainings before it starts; recommend settings."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeline.cost.gpu_table import Gpu, find_gpu, read_gpus
from pipeline.cost.measured_speed import MAX_SECONDS, NAME_A_GPU, measure_speed
from pipeline.cost.memory.ppo_memory import PPOSize, host_memory
from pipeline.cost.memory.sizes import describe_training_memory
from pipeline.cost.memory_table import (
    Choice,
    Training,
    TrainingSize,
    memory_of,
    recommended,
    render_table,
)
from pipeline.cost.run_time import (
    LAUNCHES,
    Speed,
    TableSpeed,
    describe_seconds,
    missing_speeds,
)
from pipeline.cost.training_sizes import Processes
from pipeline.settings.settings import Settings
from ppo_core.config.placement import main_memory
from ppo_core.errors import ConfigError, ModelError, ProcessError

NUMBERS_OF_GPUS = (1, 2, 4, 8)
"""Numbers of GPUs in one machine for which prices are compared."""


SpeedOf = Callable[[TrainingSize], Speed]
"""Function that returns the speed of the devices for a training's precision and sharding."""


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """A training, and functions for its size on other processes and for its time."""

    training: Training
    size_on: Callable[[Processes], TrainingSize | None]
    """Returns the size of the training on other processes; None if it cannot be computed."""

    seconds: Callable[[TrainingSize, Speed], float]
    """Returns the seconds of the training, from its size and the speed of its processes."""


def describe_memory_of(works: Sequence[TrainingCost], settings: Settings) -> list[str]:
    """Return lines of text: the memory of the trainings, the table, and recommended settings.

    Args:
        works: the trainings of the run; PPO is the last one.
        settings: settings of the run.

    Raises:
        ConfigError: see `find_gpu`.
    """
    gpu, usable = _device(works, settings)
    trainings = [work.training for work in works]
    device = f"GPU ({gpu.name})" if gpu else "process"
    lines = [
        describe_training_memory(memory_of(each.size), device, each.name)
        for each in trainings
        if memory_of(each.size).total
    ]
    if gpu and isinstance(ppo := trainings[-1].size, PPOSize):
        lines.append(
            f"main memory: about {host_memory(ppo) / 2**30:.0f} GiB per machine for PPO, whose "
            "processes load all models there before they move them to the GPUs"
        )
    title = f"Memory per {device} in GiB, {usable / 2**30:.1f} usable; * as set, ! does not fit"
    lines.append(render_table(trainings, usable, on_gpus=gpu is not None, title=title))
    return lines + _recommendations(trainings, usable, on_gpus=gpu is not None)


def describe_time_of(works: Sequence[TrainingCost], settings: Settings) -> list[str]:
    """Return lines of text: time, price, and the cheapest GPUs.

    If the settings name no GPU, and this machine has no GPU of known speed, this machine is timed
    for at most `MAX_SECONDS`. Without a GPU, the text has no price and no cheapest GPUs.

    Args:
        works: the trainings of the run; PPO is the last one.
        settings: settings of the run.

    Raises:
        ConfigError: see `find_gpu` and `measure_speed`.
    """
    gpu, usable = _device(works, settings)
    lines = [_time_and_price(works, settings, gpu, usable)]
    return [*lines, _cheapest(works, settings)] if gpu else lines


def _device(works: Sequence[TrainingCost], settings: Settings) -> tuple[Gpu | None, int]:
    """Return the GPU and its usable memory in bytes.

    Without a GPU, return None and the memory of this machine or container, divided by its number of
    processes.
    """
    gpu = find_gpu(settings.hardware)
    if gpu:
        return gpu, gpu.usable
    processes = works[-1].training.size.processes_of_a_machine
    return None, main_memory() // processes


def _recommendations(trainings: Sequence[Training], usable: int, *, on_gpus: bool) -> list[str]:
    lines = []
    for training in trainings:
        choice = recommended(training, usable, on_gpus=on_gpus)
        if choice is None:
            lines.append(
                f"{training.name}: nothing fits. Use more or larger GPUs, smaller batches, or "
                "gradient_checkpointing."
            )
        elif memory_of(training.size).total > usable:
            lines.append(
                f"{training.name} does not fit with its settings. The fastest settings that fit:"
            )
            lines.append(choice.as_settings())
    return lines


def _time_and_price(
    works: Sequence[TrainingCost], settings: Settings, gpu: Gpu | None, usable: int
) -> str:
    """Return the time of the trainings with the run's settings, and the price if it is known.

    If the time cannot be computed, return the reason.
    """
    size = works[-1].training.size
    assert isinstance(size, PPOSize)
    missing = missing_speeds(gpu, size.processes, size.machines) if gpu else []
    if gpu and settings.hardware.gpu and missing:
        return f"time: not computed, because [hardware.gpus.{gpu.name}] lacks {', '.join(missing)}."
    if gpu and not missing:
        speed_of: SpeedOf = partial(TableSpeed.of, gpu)
    elif any(memory_of(work.training.size).total > usable for work in works):
        return (
            "time: not computed. Without a GPU of known speed, this machine is timed, and not "
            f"every training fits into its memory. {NAME_A_GPU}"
        )
    else:
        try:
            speed_of = _speeds_here(works, settings)
        except (ModelError, ProcessError) as error:
            return f"time: not computed, because this machine could not be timed. {error}"
    parts, total = [], 0.0
    for work in works:
        seconds = work.seconds(work.training.size, speed_of(work.training.size))
        parts.append(f"{work.training.name} {describe_seconds(seconds)}")
        total += seconds
    text = f"time: roughly {', '.join(parts)} if every response has its full length"
    if settings.ppo.use_vllm:
        text += ", without sampling, which the vLLM server does"
    if size.machines > 1 and (missing or gpu is None):
        text += ", without the exchange between machines"
    if gpu is None:
        return f"{text}, on this machine"
    text += f", on {size.processes} x {gpu.name}"
    assumed = "" if missing or settings.ppo.use_vllm else _assumed_decoding(size, speed_of(size))
    if gpu.price is None:
        unknown = (
            f"no price of {gpu.name}: set hardware.gpu and [hardware.gpus.NAME] price_per_hour"
        )
        return f"{text}; {unknown}{assumed}"
    price = total / 3600 * size.processes * gpu.price
    rate = f"{gpu.price:g} per GPU and hour"
    return f"{text}; price: about {price:,.2f} US dollars at {rate}{assumed}"


def _assumed_decoding(size: PPOSize, speed: Speed) -> str:
    """Return a line with the assumed time to sample one token for each response of a batch."""
    return (
        f"\nassumed: {1000 * speed.decoding(size.policy):.1f} ms to sample one token of "
        f"each of {size.sampled_rows} responses together. Each layer takes at least "
        f"{1000 * LAUNCHES:.2f} ms, because Python launches its kernels. A larger "
        "local_rollout_forward_batch_size takes less time and more memory."
    )


def _speeds_here(works: Sequence[TrainingCost], settings: Settings) -> SpeedOf:
    """Measure this machine with the batches of PPO; return a function that returns the speed.

    The speed is measured once for each combination of precision and sharding that a training has.
    All measurements together take at most `MAX_SECONDS`.

    Raises:
        ConfigError: see `measure_speed`.
        ModelError: see `measure_speed`.
        ProcessError: see `measure_speed`.
    """
    ppo = works[-1].training.size
    assert isinstance(ppo, PPOSize)
    sizes = {_precision_and_sharding(one.training.size): one.training.size for one in works}
    ends = time.monotonic() + MAX_SECONDS
    measured = {
        key: measure_speed(
            settings.policy,
            replace(ppo, autocast=size.autocast, sharding=size.sharding),
            seconds=ends - time.monotonic(),
        )
        for key, size in sizes.items()
    }
    return lambda size: measured[_precision_and_sharding(size)]


def _precision_and_sharding(size: TrainingSize) -> tuple[bool, str]:
    return size.autocast, size.sharding


def _cheapest(works: Sequence[TrainingCost], settings: Settings) -> str:
    """Return the cheapest GPUs of the table on which all trainings fit, as text."""
    offers = []
    table = read_gpus(settings.hardware).values()
    gpus = [gpu for gpu in table if gpu.price]
    for number in NUMBERS_OF_GPUS:
        try:
            on_these = [_on_gpus(work, number) for work in works]
        except ConfigError:
            continue  # The batches cannot be divided among this number of processes.
        for gpu in gpus:
            if missing_speeds(gpu, number, machines=1):
                continue
            found = [_fastest(work, gpu) for work in on_these]
            if None not in found:
                assert gpu.price is not None
                seconds = sum(one[1] for one in found if one)
                price = seconds / 3600 * number * gpu.price
                ways = [one[0] for one in found if one]
                offers.append((price, seconds, number, gpu.name, ways))
    if not offers:
        numbers = ", ".join(map(str, NUMBERS_OF_GPUS))
        return (
            f"cheapest: none found. On {numbers} GPUs of a type with known price and speed, some "
            "training does not fit, or its batches cannot be divided."
        )
    machines = "num_nodes = 1\n" if settings.num_nodes > 1 else ""
    price, seconds, number, name, ways = min(offers, key=lambda offer: offer[0])
    chosen = "\n".join(dict.fromkeys(way.as_settings() for way in ways))
    return (
        f"cheapest of the table: {number} x {name}, {describe_seconds(seconds)}, about "
        f"{price:,.2f} US dollars, with\n{machines}processes = {number}\n{chosen}"
    )


def _on_gpus(work: TrainingCost, number: int) -> TrainingCost:
    """Return a training on `number` processes of one machine, each with a GPU.

    Raises:
        ConfigError: the batches cannot be divided among this number of processes.
    """
    size = work.size_on(Processes(number=number, on_gpus=True))
    assert size is not None
    return replace(work, training=replace(work.training, size=size))


def _fastest(work: TrainingCost, gpu: Gpu) -> tuple[Choice, float] | None:
    """Return the fastest choice that fits on these GPUs, and its seconds.

    Return None if nothing fits with the run's method (all parameters or LoRA) and kind of critic.
    """
    training = work.training
    way = recommended(training, gpu.usable, on_gpus=True)
    if way is None or way.shares_critic or way.lora != bool(training.size.adapter):
        return None
    return way, work.seconds(way.size, TableSpeed.of(gpu, way.size))
