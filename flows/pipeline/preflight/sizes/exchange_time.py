"""Compute the time in which processes exchange weights and gradients.

ddp and zero1 sum all gradients once for each optimizer step; zero1 then sends the new weights.
zero2 sums them in each backward pass, and sends the weights once for each step (arXiv:1910.02054,
section 5). zero3 and fsdp2 sum them in each backward pass, and gather the weights of the layers for
both passes, and those outside the layers once (arXiv:2304.11277, section 3).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from ppo_core.training.memory.ppo_memory import PPOSize
from ppo_core.training.memory.sizes import FP32, ModelSize, Shards
from ppo_core.training.memory.supervised_memory import SupervisedSize


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
        """Return seconds in which gradients are summed over the processes."""


def ppo_exchange_seconds(
    size: PPOSize, speed: ExchangeSpeed, *, batch_rows: float, step_rows: float, steps: int
) -> float:
    """Return the seconds of an update.

    Args:
        size: sizes of models and batches.
        speed: speed of the processes.
        batch_rows: responses of a process.
        step_rows: responses of a process in an optimizer step.
        steps: optimizer steps of the update.
    """
    policy = Parameters.of(size.policy, size.base_bytes if size.adapter else FP32)
    critic = [Parameters.of(size.critic)] if size.critic else []
    module = [policy, *critic]
    learning = [Parameters(size.adapter) if size.adapter else policy, *critic]
    passes = ceil(step_rows / _rows_of_a_pass(size))
    seconds = steps * _step_seconds(size, speed, module, learning, passes)
    if size.shards_weights:
        seconds += _gathering_seconds(size, speed, module, ceil(batch_rows / size.sampled_rows))
    return seconds


def supervised_exchange_seconds(
    size: SupervisedSize, speed: ExchangeSpeed, *, passes: int, steps: int
) -> float:
    """Return the seconds of a supervised training with so many passes in each optimizer step."""
    learning = Parameters(size.adapter) if size.adapter else Parameters.of(size.model)
    return steps * _step_seconds(size, speed, [Parameters.of(size.model)], [learning], passes)


def _step_seconds(
    size: Shards,
    speed: ExchangeSpeed,
    models: Iterable[Parameters],
    learning: Iterable[Parameters],
    passes: int,
) -> float:
    """Return the seconds of an optimizer step with so many passes forward and backward."""
    if size.processes == 1:
        return 0.0
    summed = sum(map(speed.reducing, learning))
    if size.shards_weights:
        for model in models:
            summed += speed.gathering(model) + speed.gathering(Parameters(model.layers))
        return passes * summed
    sent = sum(map(speed.gathering, learning))
    return (passes if size.sharding == "zero2" else 1) * summed + sent


def _gathering_seconds(
    size: PPOSize, speed: ExchangeSpeed, module: Sequence[Parameters], batches: int
) -> float:
    """Return the seconds in which sharded weights are gathered for sampling and scoring.

    The module of policy and critic is gathered to sample and for the values, reference and reward
    model to score. Without `gathers`, each pass gathers the layers again.
    """
    policy, critic = module[0], module[-1]
    reference = module if size.adapter else [policy]

    def seconds(held: Iterable[Parameters], passing: Parameters, passes: int) -> float:
        if size.gathers:
            return sum(map(speed.gathering, held))
        outside = sum(speed.gathering(Parameters(0.0, each.outside)) for each in held)
        return outside + passes * speed.gathering(Parameters(passing.layers))

    reward = Parameters.of(size.reward)
    return (
        seconds(module, policy, batches * size.response_tokens)
        + seconds([reward], reward, batches)
        + seconds(reference, policy, batches)
        + seconds(module, critic, batches)
    )


def _rows_of_a_pass(size: PPOSize) -> int:
    """Return how many of the longest responses a process trains on in a pass."""
    return max(size.trained_tokens // (size.prompt_tokens + size.response_tokens), 1)
