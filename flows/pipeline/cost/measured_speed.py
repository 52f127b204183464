"""Measure the speed of this machine on two models: a run's policy, cut to two numbers of layers.

A pass through L layers takes a + b L seconds. Models of two depths give b, the time of a layer, and
a, the time of everything outside the layers: embeddings, LM head, and drawing tokens.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.cost.exchange_time import ParameterCount
from pipeline.cost.memory.ppo_memory import PPOSize
from pipeline.cost.memory.sizes import ModelSize
from pipeline.cost.run_time import Backward
from pipeline.launch.commands import gpus
from pipeline.launch.launcher import train
from ppo_core.errors import ModelError, ProcessError
from ppo_core.io.progress_bar import ProgressBar, progress
from ppo_core.training.speed.job import WORKS, FoundSpeed, SpeedJob, read_speed, write_speed_job

PROGRAM = ("ppo_core.training.speed",)
"""Module that measures the speed, see `pipeline.launch.commands.PPO`."""

NAME_A_GPU = "Set hardware.gpu to a GPU whose speeds are known."
"""Advice in an error if this machine cannot be timed."""

MAX_LAYERS = 6
"""Maximum number of layers of the deeper of the two models that are measured."""

MAX_PARAMETERS = 5 * 10**8
"""Maximum number of parameters of a measured model; a larger model would take minutes."""

MAX_SECONDS = 180.0
"""Time limit in seconds of all measurements of `--check`. If they take longer, time and price stay
unknown."""


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """Seconds of a pass with L layers: outside + layer x L."""

    outside: float
    layer: float

    @classmethod
    def through(cls, depths: Sequence[int], seconds: Sequence[float]) -> "LinearCost":
        """Return the line through the seconds at two depths.

        If noise makes the line fall, its slope is set to 0.
        """
        layer = max(seconds[1] - seconds[0], 0.0) / (depths[1] - depths[0])
        return cls(outside=max(seconds[0] - depths[0] * layer, 0.0), layer=layer)

    def minus(self, other: "LinearCost", *, layers: int) -> "LinearCost":
        """Return this cost minus `other`; subtract `layers` layers of `other` from each layer."""
        return LinearCost(
            outside=self.outside - other.outside, layer=self.layer - layers * other.layer
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """Speed of one process of this machine, for the batches of a run."""

    model: ModelSize
    """The policy, whose layers were measured."""

    scoring: LinearCost
    """Cost of a pass without gradients, per token of prompt and response."""

    updating: LinearCost
    """Cost of a forward and backward pass, per token of prompt and response."""

    drawing: LinearCost
    """Cost of sampling one token for each response of a batch."""

    gathered: LinearCost
    """Cost of gathering the sharded weights of the policy once."""

    reduced: LinearCost
    """Cost of summing the gradients of the policy over the processes."""

    answered: float
    """Fraction of the measured tokens whose logits were computed."""

    adam: float
    """Seconds of an optimizer step per parameter."""

    @classmethod
    def of(cls, found: FoundSpeed, size: PPOSize) -> "MeasuredSpeed":
        """Return the speed from the times that the processes measured on the batches of `size`."""
        depths = [each.layers for each in found.passes]

        def line(name: str) -> LinearCost:
            return LinearCost.through(depths, [getattr(each, name) for each in found.passes])

        gathered, exchange = line("gathering"), line("exchange")
        if size.shards_weights:
            # Subtract the time to gather weights in a pass, see `exchange_time`. zero3 gathers them
            # once, because the measured models have at most `REUSED` parameters.
            exchange = exchange.minus(gathered, layers=2 if size.sharding == "fsdp2" else 1)
        return cls(
            model=size.policy,
            scoring=line("scoring"),
            updating=line("updating"),
            drawing=line("drawing"),
            gathered=gathered,
            reduced=exchange,
            answered=size.response_tokens / (size.prompt_tokens + size.response_tokens),
            adam=found.adam,
        )

    def forward(self, model: ModelSize, tokens: float, logit_tokens: float) -> float:
        """Return seconds of passes without gradients; `logit_tokens` of the tokens get logits."""
        return self._pass(self.scoring, model, tokens, logit_tokens)

    def training(
        self, model: ModelSize, tokens: float, logit_tokens: float, backward: Backward
    ) -> float:
        """Return seconds of passes forward and backward.

        The measured passes compute gradients of weights and have no `gradient_checkpointing`. If
        the weights are frozen, the time of their gradients is subtracted: half of the backward
        pass. If activations are recomputed, the time of a forward pass is added.
        """
        seconds = self._pass(self.updating, model, tokens, logit_tokens)
        if backward.is_frozen:
            seconds = (seconds + self._pass(self.scoring, model, tokens, logit_tokens)) / 2
        return seconds + (self.forward(model, tokens, 0) if backward.recomputes else 0.0)

    def decoding(self, model: ModelSize) -> float:
        """Return seconds to sample one token for each sequence of a batch."""
        return self.drawing.outside + self.drawing.layer * self._layers(model)

    def launching(self, model: ModelSize) -> float:
        """Return 0: the measured times already include the launches of kernels."""
        return 0.0

    def optimizer(self, parameters: float) -> float:
        """Return seconds of an optimizer step on this number of parameters."""
        return self.adam * parameters

    def gathering(self, parameters: ParameterCount) -> float:
        """Return the seconds of an all-gather of sharded weights."""
        return self._exchanging(self.gathered, parameters)

    def reducing(self, parameters: ParameterCount) -> float:
        """Return the seconds to sum gradients over the processes."""
        return self._exchanging(self.reduced, parameters)

    def _exchanging(self, line: LinearCost, parameters: ParameterCount) -> float:
        outside = line.outside * parameters.outside / self.model.outside_layers
        return max(outside + line.layer * parameters.layers / self.model.of_a_layer, 0.0)

    def _pass(
        self, line: LinearCost, model: ModelSize, tokens: float, logit_tokens: float
    ) -> float:
        outside = line.outside * logit_tokens / self.answered
        return outside + line.layer * self._layers(model) * tokens

    def _layers(self, model: ModelSize) -> float:
        """Return the number of policy layers that have as many weights as the layers of `model`."""
        return (model.parameters - model.outside_layers) / self.model.of_a_layer


def measure_speed(policy: str, size: PPOSize, *, seconds: float = MAX_SECONDS) -> MeasuredSpeed:
    """Measure the speed of this machine on a policy, and show a progress bar.

    The number of timed processes is the number that a training starts on this machine.

    Args:
        policy: folder or hub id.
        size: sizes of the batches.
        seconds: time limit.

    Raises:
        ConfigError: the settings of the processes contradict each other.
        ModelError: the policy's configuration cannot be read, or the policy is too large to be
            measured.
        ProcessError: a process died or was frozen, there are more processes than GPUs, or the time
            limit was reached.
    """
    depths, processes = _depths(size.policy), size.processes_of_a_machine
    if not size.on_cpu and processes > gpus():
        raise ProcessError(
            f"{processes} processes need a GPU each, and this machine has {gpus()}. {NAME_A_GPU}"
        )
    job = SpeedJob(
        policy=policy,
        depths=depths,
        sharding=size.sharding,
        autocast=size.autocast,
        use_cpu=size.on_cpu,
        prompt_tokens=size.prompt_tokens,
        response_tokens=size.response_tokens,
        sampled_rows=size.sampled_rows,
        trained_rows=size.trained_rows,
    )
    name = f"timing this machine ({'bf16' if size.autocast else 'fp32'}, {size.sharding})"
    with TemporaryDirectory() as folder, progress(None, name, "pass") as bar:
        watch = _Watch(bar, seconds)
        train(
            write_speed_job(job, Path(folder)),
            processes=processes,
            program=PROGRAM,
            on_metrics=watch.advance,
            on_wait=watch.look,
        )
        return MeasuredSpeed.of(read_speed(Path(folder)), size)


class _Watch:
    """Shows how many passes were timed, and raises after the time limit."""

    def __init__(self, bar: ProgressBar, seconds: float) -> None:
        self._bar = bar
        self._ends = time.monotonic() + seconds

    def advance(self, number: int, metrics: Mapping[str, float]) -> None:
        self._bar.total = int(metrics[WORKS])
        self._bar.update(number - self._bar.n)

    def look(self) -> None:
        self._bar.keep_showing()
        if time.monotonic() >= self._ends:
            raise ProcessError(
                f"Timing this machine took longer than {MAX_SECONDS:.0f} s, so time and price are "
                f"unknown. {NAME_A_GPU}"
            )


def _depths(model: ModelSize) -> tuple[int, int]:
    """Return the numbers of layers of the two models that are measured.

    Raises:
        ModelError: a model of two layers is too large to be measured.
    """
    fitting = (MAX_PARAMETERS - model.outside_layers) // model.of_a_layer
    if fitting < 2:
        raise ModelError(
            f"With two of its layers, the policy has more than {MAX_PARAMETERS:,} parameters. "
            f"{NAME_A_GPU}"
        )
    return 1, max(2, min(MAX_LAYERS, model.layers, fitting))
