"""Compute the time that processes take to exchange weights and gradients.

ddp and zero1 reduce (sum) all gradients once for each optimizer step; zero1 then gathers the new
weights. zero2 reduces gradients in each backward pass, and gathers the new weights once for each
step (arXiv:1910.02054, section 5). fsdp2 reduces gradients in each backward pass. It gathers the
weights of the layers for the forward and for the backward pass, and other weights once
(arXiv:2304.11277, section 3). zero3 also reduces gradients in each backward pass. It gathers all
weights for the forward and again for the backward pass, or only once if the model has at most
`REUSED` parameters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from pipeline.cost.memory.ppo_memory import PPOSize
from pipeline.cost.memory.sizes import FP32, ModelSize, Shards
from pipeline.cost.memory.supervised_memory import SupervisedSize

REUSED = 500_000_000
"""Largest number of parameters for which ZeRO-3 keeps the weights gathered between the forward and
the backward pass. The number is half of DeepSpeed's stage3_max_reuse_distance, which counts the
parameters of both passes."""


@dataclass(frozen=True)
class ParameterCount:
    """Number of a model's parameters in its layers, and outside the layers, in units of fp32.

    A parameter in half precision counts as 0.5, because half as many bytes are sent.
    """

    layers: float
    outside: float = 0.0

    @classmethod
    def of(cls, model: ModelSize, bytes_each: int = FP32) -> "ParameterCount":
        """Return the counts of a model whose parameters have `bytes_each` bytes each."""
        share = bytes_each / FP32
        layers = model.parameters - model.outside_layers
        return cls(share * layers, share * model.outside_layers)


class ExchangeSpeed(Protocol):
    """Seconds that the processes of a training take to exchange weights and gradients."""

    def gathering(self, parameters: ParameterCount) -> float:
        """Return the seconds of an all-gather of sharded weights."""

    def reducing(self, parameters: ParameterCount) -> float:
        """Return the seconds to sum gradients over the processes.

        If weights are sharded, this is a reduce-scatter, otherwise an all-reduce.
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
    """Return the seconds that a process takes in an update to exchange weights and gradients.

    Args:
        size: sizes of models and batches.
        speed: speed of the exchange.
        batch_rows: responses of a process in the update.
        step_rows: responses of a process in an optimizer step.
        steps: optimizer steps of the update.
        samples_here: whether the training's processes sample; otherwise a server samples.
    """
    if size.processes == 1:
        return 0.0
    policy = ParameterCount.of(size.policy, size.base_bytes if size.adapter else FP32)
    critic = [ParameterCount.of(size.critic)] if size.critic else []
    module = [policy, *critic]
    learning = [ParameterCount(size.adapter) if size.adapter else policy, *critic]
    passes = ceil(step_rows / rows_of_a_pass(size))
    seconds = steps * _step_exchange_seconds(size, speed, module, learning, passes)
    if size.shards_weights:
        batches = ceil(batch_rows / size.sampled_rows)
        sampling = batches * size.response_tokens if samples_here else batches
        seconds += _gathering_seconds(size, speed, module, batches, sampling)
    return seconds


def supervised_exchange_seconds(
    size: SupervisedSize, speed: ExchangeSpeed, *, passes: float, steps: int
) -> float:
    """Return the seconds of exchange in a supervised training.

    `passes` is the mean number of passes in an optimizer step. `steps` is the number of optimizer
    steps.
    """
    if size.processes == 1:
        return 0.0
    model = ParameterCount.of(size.model)
    learning = ParameterCount(size.adapter) if size.adapter else model
    return steps * _step_exchange_seconds(size, speed, [model], [learning], passes)


def _step_exchange_seconds(
    size: Shards,
    speed: ExchangeSpeed,
    models: Sequence[ParameterCount],
    learning: Sequence[ParameterCount],
    passes: float,
) -> float:
    """Return the seconds of exchange in an optimizer step of `passes` forward-backward passes."""
    reducing = sum(map(speed.reducing, learning))
    if size.shards_weights:
        return passes * (reducing + sum(_gathering_of_a_pass(size, speed, one) for one in models))
    seconds = (passes if size.sharding == "zero2" else 1) * reducing
    return seconds if size.sharding == "ddp" else seconds + sum(map(speed.gathering, learning))


def _gathering_of_a_pass(size: Shards, speed: ExchangeSpeed, model: ParameterCount) -> float:
    """Return the seconds to gather a model's weights in one forward-backward pass."""
    if size.sharding == "fsdp2":
        return speed.gathering(model) + speed.gathering(ParameterCount(model.layers))
    is_kept = model.layers + model.outside <= REUSED
    return (1 if is_kept else 2) * speed.gathering(model)


def _gathering_seconds(
    size: PPOSize,
    speed: ExchangeSpeed,
    module: Sequence[ParameterCount],
    batches: int,
    sampling_passes: int,
) -> float:
    """Return the seconds to gather sharded weights for sampling and scoring in an update.

    Policy and critic are one module. With an adapter, this module also contains the reference. With
    `gathers`, the module is gathered for sampling and again for the critic's pass, and the module
    of the reference and each reward model are gathered once. Without `gathers`, each pass under
    zero3 gathers all weights of its model again. Under fsdp2, each pass gathers the weights of the
    layers again, and the weights outside the layers are gathered once.
    """
    policy, critic = module[0], module[-1]
    reference = module if size.adapter else [policy]

    def of_model(held: Iterable[ParameterCount], used: ParameterCount, passes: int) -> float:
        if size.gathers:
            return sum(map(speed.gathering, held))
        if size.sharding == "zero3":
            return passes * speed.gathering(used)
        outside = sum(speed.gathering(ParameterCount(0.0, each.outside)) for each in held)
        return outside + passes * speed.gathering(ParameterCount(used.layers))

    rewards = map(ParameterCount.of, size.rewards)
    return (
        of_model(module, policy, sampling_passes)
        + sum(of_model([reward], reward, batches) for reward in rewards)
        + of_model(reference, policy, batches)
        + of_model(module, critic, batches)
    )


def rows_of_a_pass(size: PPOSize) -> int:
    """Return the number of sequences of maximum length that a process trains on in a pass."""
    return max(size.trained_tokens // (size.prompt_tokens + size.response_tokens), 1)
