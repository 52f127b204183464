"""Compute the time in which processes exchange weights and gradients.

ddp and zero1 sum all gradients once for each optimizer step; zero1 then sends the new weights.
zero2 sums them in each backward pass, and sends the weights once for each step (arXiv:1910.02054,
section 5). fsdp2 sums them in each backward pass, and gathers the weights of the layers for both
passes, and those outside the layers once (arXiv:2304.11277, section 3). zero3 gathers all for both
passes, or once if the model is so small that it keeps them (`REUSED`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from ppo_core.training.memory.ppo_memory import PPOSize
from ppo_core.training.memory.sizes import FP32, ModelSize, Shards
from ppo_core.training.memory.supervised_memory import SupervisedSize

REUSED = 500_000_000
"""Parameters up to which ZeRO-3 keeps a model's gathered weights from the forward to the backward
pass: half of DeepSpeed's stage3_max_reuse_distance, which counts both passes."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters in the layers of a model, and outside them.

    Those in half precision count half, because half as many bytes are sent.
    """

    layers: float
    outside: float = 0.0

    @classmethod
    def of(cls, model: ModelSize, size: int = FP32) -> "Parameters":
        """Return the numbers of a model with so many bytes in a parameter."""
        share = size / FP32
        layers = model.parameters - model.outside_layers
        return cls(share * layers, share * model.outside_layers)


class ExchangeSpeed(Protocol):
    """Seconds in which the processes of a training exchange weights and gradients."""

    def gathering(self, parameters: Parameters) -> float:
        """Return seconds in which every process gets all of some sharded weights."""

    def reducing(self, parameters: Parameters) -> float:
        """Return seconds in which gradients are summed over the processes.

        If weights are sharded, each process gets the sums of its shard, and else all sums.
        """


def ppo_exchange_seconds(
    size: PPOSize,
    speed: ExchangeSpeed,
    *,
    batch_rows: float,
    step_rows: float,
    steps: int,
    samples_here: bool,
) -> float:
    """Return the seconds of an update.

    Args:
        size: sizes of models and batches.
        speed: speed of the processes.
        batch_rows: responses of a process.
        step_rows: responses of a process in an optimizer step.
        steps: optimizer steps of the update.
        samples_here: whether the processes sample, and no server.
    """
    if size.processes == 1:
        return 0.0
    policy = Parameters.of(size.policy, size.base_bytes if size.adapter else FP32)
    critic = [Parameters.of(size.critic)] if size.critic else []
    module = [policy, *critic]
    learning = [Parameters(size.adapter) if size.adapter else policy, *critic]
    passes = ceil(step_rows / _rows_of_a_pass(size))
    seconds = steps * _step_seconds(size, speed, module, learning, passes)
    if size.shards_weights:
        batches = ceil(batch_rows / size.sampled_rows)
        sampling = batches * size.response_tokens if samples_here else batches
        seconds += _gathering_seconds(size, speed, module, batches, sampling)
    return seconds


def supervised_exchange_seconds(
    size: SupervisedSize, speed: ExchangeSpeed, *, passes: int, steps: int
) -> float:
    """Return the seconds of a supervised training with so many passes in each optimizer step."""
    if size.processes == 1:
        return 0.0
    learning = Parameters(size.adapter) if size.adapter else Parameters.of(size.model)
    return steps * _step_seconds(size, speed, [Parameters.of(size.model)], [learning], passes)


def _step_seconds(
    size: Shards,
    speed: ExchangeSpeed,
    models: Sequence[Parameters],
    learning: Sequence[Parameters],
    passes: int,
) -> float:
    """Return the seconds of an optimizer step with so many passes forward and backward."""
    reducing = sum(map(speed.reducing, learning))
    if size.shards_weights:
        return passes * (reducing + sum(_gathering_of_a_pass(size, speed, one) for one in models))
    seconds = (passes if size.sharding == "zero2" else 1) * reducing
    return seconds if size.sharding == "ddp" else seconds + sum(map(speed.gathering, learning))


def _gathering_of_a_pass(size: Shards, speed: ExchangeSpeed, model: Parameters) -> float:
    """Return the seconds in which a pass forward and backward gathers the weights of a model."""
    if size.sharding == "fsdp2":
        return speed.gathering(model) + speed.gathering(Parameters(model.layers))
    is_kept = model.layers + model.outside <= REUSED
    return (1 if is_kept else 2) * speed.gathering(model)


def _gathering_seconds(
    size: PPOSize,
    speed: ExchangeSpeed,
    module: Sequence[Parameters],
    batches: int,
    sampling_passes: int,
) -> float:
    """Return the seconds in which sharded weights are gathered for sampling and scoring.

    The module of policy and critic is gathered to sample and for the values, reference and reward
    model to score. Without `gathers`, each pass gathers again: under fsdp2 the layers, under zero3
    all weights.
    """
    policy, critic = module[0], module[-1]
    reference = module if size.adapter else [policy]

    def seconds(held: Iterable[Parameters], passing: Parameters, passes: int) -> float:
        if size.gathers:
            return sum(map(speed.gathering, held))
        if size.sharding == "zero3":
            return passes * speed.gathering(passing)
        outside = sum(speed.gathering(Parameters(0.0, each.outside)) for each in held)
        return outside + passes * speed.gathering(Parameters(passing.layers))

    reward = Parameters.of(size.reward)
    return (
        seconds(module, policy, sampling_passes)
        + seconds([reward], reward, batches)
        + seconds(reference, policy, batches)
        + seconds(module, critic, batches)
    )


def _rows_of_a_pass(size: PPOSize) -> int:
    """Return how many of the longest responses a process trains on in a pass."""
    return max(size.trained_tokens // (size.prompt_tokens + size.response_tokens), 1)
