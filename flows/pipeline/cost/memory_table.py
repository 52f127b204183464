"""Show the memory of each training by sharding, precision and method, and recommend one choice.

A method trains either all parameters or LoRA adapters.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console
from rich.table import Table

from pipeline.cost.memory.ppo_memory import PPOSize, peak_memory
from pipeline.cost.memory.sizes import BF16, FP32, Memory
from pipeline.cost.memory.supervised_memory import SupervisedSize, peak_supervised_memory
from ppo_core.config.run_config import Sharding
from ppo_core.distributed.choose_sharding import SHARD_WEIGHTS

TrainingSize = PPOSize | SupervisedSize

RANK = 16
"""Assumed rank of LoRA adapters for a training that has none in the settings."""

WIDTH = 106
"""Maximum number of characters in a line of the table."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training of the run, and the adapters that it would have with LoRA."""

    name: str
    """SFT, reward model or PPO."""

    section: str
    """Section of the training in the settings file."""

    size: TrainingSize
    """Sizes with the settings of the run."""

    adapter: int
    """Number of adapter parameters. Without adapters in the settings: the number for adapters of
    rank RANK on all linear layers."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a training."""

    training: Training
    lora: bool
    bf16: bool
    sharding: Sharding
    shares_critic: bool = False
    """Whether the critic becomes a value head on the policy's backbone."""

    halves_base: bool = False
    """Whether the frozen model under LoRA adapters is stored in bfloat16 although the settings
    store it in fp32."""

    @property
    def size(self) -> TrainingSize:
        """Sizes of the training with this choice."""
        size = replace(
            self.training.size,
            sharding=self.sharding,
            autocast=self.bf16,
            adapter=self.training.adapter if self.lora else 0,
        )
        as_set = size.on_cpu or self.bf16 == self.training.size.autocast
        keeps_base = bool(self.training.size.adapter) and as_set and not self.halves_base
        if isinstance(size, PPOSize) and not (self.lora and keeps_base):
            size = replace(size, base_bytes=BF16 if self.lora and self.bf16 else FP32)
        if isinstance(size, PPOSize) and self.shares_critic:
            return replace(size, critic=None)
        return size

    @property
    def memory(self) -> Memory:
        """Memory of the phase that needs the most memory."""
        return memory_of(self.size)

    @property
    def is_set(self) -> bool:
        """Whether the settings of the run make this choice."""
        return self.size == self.training.size

    def as_settings(self) -> str:
        """Return the lines to write into the settings file."""
        lines = [f"[{self.training.section}]", f"bf16 = {str(self.bf16).lower()}"]
        if self.size.processes > 1:
            lines.insert(1, f'sharding = "{self.sharding}"')
        if self.shares_critic:
            lines.append("shared_critic = true")
        if not self.lora:
            return "\n".join(lines)
        rank = [] if self.training.size.adapter else [f"r = {RANK}"]
        if isinstance(size := self.size, PPOSize):
            dtype = "bfloat16" if size.base_bytes == BF16 else "float32"
            return "\n".join([*lines, "[lora]", *rank, f'dtype = "{dtype}"'])
        return "\n".join([*lines, *([f"[{self.training.section}.lora]", *rank] if rank else [])])


def memory_of(size: TrainingSize) -> Memory:
    """Return the memory of the phase of a training that needs the most memory."""
    return peak_memory(size) if isinstance(size, PPOSize) else peak_supervised_memory(size)


def choices(training: Training, *, on_gpus: bool) -> Iterator[Choice]:
    """Yield the ways to run a training, roughly the fastest first.

    All parameters come before LoRA, bfloat16 before fp32, and the shardings in the order ddp,
    zero1, zero2, zero3, fsdp2. On a CPU, only one precision is tried: the precision in the
    settings, or the trainer's default if the settings name none. An exponential moving average of
    the weights needs all weights in every process, so it excludes zero3 and fsdp2.
    """
    several: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    if isinstance(training.size, PPOSize) and training.size.averages:
        several = tuple(kind for kind in several if kind not in SHARD_WEIGHTS)
    kinds: tuple[Sharding, ...] = several if training.size.processes > 1 else ("none",)
    precisions = (True, False) if on_gpus else (training.size.autocast,)
    for lora in (False, True):
        for bf16 in precisions:
            for sharding in kinds:
                yield Choice(training=training, lora=lora, bf16=bf16, sharding=sharding)


def recommended(training: Training, usable: int, *, on_gpus: bool) -> Choice | None:
    """Return the first choice that fits, in the order of `choices`; None if nothing fits.

    The other method (all parameters or LoRA) is recommended only if nothing fits with the run's
    method. Within a method, a critic on the policy's backbone is recommended only if nothing fits
    with a separate critic.

    Args:
        training: the training.
        usable: bytes that a process may take.
        on_gpus: whether each process has a GPU.
    """
    ways = list(choices(training, on_gpus=on_gpus))
    if on_gpus and training.size.adapter:
        ways = [replace(way, halves_base=True) for way in ways if way.lora and way.bf16] + ways
    if isinstance(training.size, PPOSize) and training.size.critic is not None:
        ways += [replace(way, shares_critic=True) for way in ways]
    fitting = [way for way in ways if way.memory.total <= usable]
    fitting.sort(key=lambda way: way.lora != bool(training.size.adapter))
    return fitting[0] if fitting else None


def render_table(trainings: Sequence[Training], usable: int, *, on_gpus: bool, title: str) -> str:
    """Return the table as text, in GiB; `!` marks what does not fit, `*` the run's settings."""
    found = [list(choices(training, on_gpus=on_gpus)) for training in trainings]
    kinds = list(dict.fromkeys(choice.sharding for each in found for choice in each))
    table = Table("training", "trains", "dtype", title=title, title_justify="left")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for each in found:
        for (lora, bf16), cells in groupby(each, key=lambda choice: (choice.lora, choice.bf16)):
            table.add_row(
                each[0].training.name,
                "LoRA" if lora else "all",
                "bf16" if bf16 else "fp32",
                *(_cell(choice, usable) for choice in cells),
            )
    console = Console(file=io.StringIO(), width=WIDTH, markup=False, emoji=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


def _cell(choice: Choice, usable: int) -> str:
    memory = choice.memory.total
    mark = "*" if choice.is_set else ""
    return f"{mark}{memory / 2**30:.1f}{'!' if memory > usable else ''}"
