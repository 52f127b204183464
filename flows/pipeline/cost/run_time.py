"""Estimate the time of a run's trainings before it starts, from their sizes and the devices.

A forward pass takes 2 operations for each weight and token, and a backward pass 4
(arXiv:2001.08361, section 2.1). Sampling reads all weights once to draw one token of each response
in a batch.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from pipeline.cost.exchange_time import (
    ExchangeSpeed,
    ParameterCount,
    ppo_exchange_seconds,
    rows_of_a_pass,
    supervised_exchange_seconds,
)
from pipeline.cost.gpu_table import Gpu
from pipeline.cost.memory.ppo_memory import PPOSize
from pipeline.cost.memory.sizes import BF16, FP32, ModelSize
from pipeline.cost.memory.supervised_memory import SupervisedSize
from ppo_core.config.run_config import Sharding
from ppo_core.distributed.choose_sharding import SHARD_WEIGHTS
from ppo_core.ppo.schedule import Schedule

PEAK_SHARE = 0.4
"""Assumed fraction of a GPU's peak rates (operations and bytes per second) that passes reach. For
the training of large language models, 0.3 to 0.5 are reported (arXiv:2204.02311)."""

LINK_SHARE = 0.7
"""Assumed fraction of the bandwidth between processes that collectives reach."""

PUBLISHED_RATE, PUBLISHED_LAYERS = 49.94, 24
"""Tokens per second that Qwen2-0.5B-Instruct generates with transformers on an A100 at batch size 1
(https://qwen.readthedocs.io/en/v2.0/benchmark/speed_benchmark.html), and its number of layers."""

LAUNCHES = 1 / PUBLISHED_RATE / PUBLISHED_LAYERS
"""Seconds that Python takes to launch the kernels of one layer, 0.83 ms. Without captured graphs, a
layer takes at least this time for each sampled token, even on a faster GPU. The same lower limit is
assumed for every other forward pass, and for every backward pass."""

OPTIMIZER_NUMBERS = 7
"""How many fp32 values AdamW reads or writes per parameter: weight and two moments are read and
written, the gradient is read."""


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What a backward pass of a model computes.

    The gradients of the inputs take as many operations as a forward pass, and the gradients of the
    weights take as many again.
    """

    recomputes: bool
    """Whether the backward pass repeats the forward pass of the layers."""

    is_frozen: bool
    """Whether the weights are frozen under an adapter and get no gradients."""


class Speed(ExchangeSpeed, Protocol):
    """Seconds that one process of a training takes for each part of the training."""

    def forward(self, model: ModelSize, tokens: float, logit_tokens: float) -> float:
        """Return seconds of passes without gradients; `logit_tokens` of the tokens get logits."""

    def training(
        self, model: ModelSize, tokens: float, logit_tokens: float, backward: Backward
    ) -> float:
        """Return seconds of passes forward and backward."""

    def decoding(self, model: ModelSize) -> float:
        """Return seconds to sample one token for each sequence of a batch."""

    def launching(self, model: ModelSize) -> float:
        """Return the minimum duration of a pass, in seconds."""

    def optimizer(self, parameters: float) -> float:
        """Return seconds of an optimizer step on this number of parameters."""


@dataclass(frozen=True, kw_only=True)
class TableSpeed:
    """Speed of a GPU, computed from its peak rates."""

    gpu: Gpu
    autocast: bool
    """Whether passes compute in bfloat16."""

    processes: int
    """Number of processes on all machines, each with such a GPU."""

    machines: int
    """Number of machines."""

    sharding: Sharding
    """How the processes share weights and optimizer states."""

    @classmethod
    def of(cls, gpu: Gpu, size: PPOSize | SupervisedSize) -> "TableSpeed":
        """Return the speed of a GPU with the precision and the processes of a training."""
        return cls(
            gpu=gpu,
            autocast=size.autocast,
            processes=size.processes,
            machines=size.machines,
            sharding=size.sharding,
        )

    def forward(self, model: ModelSize, tokens: float, logit_tokens: float) -> float:
        """Return seconds of passes without gradients; `logit_tokens` of the tokens get logits."""
        return 2 * _products(model, tokens, logit_tokens) / self._operations

    def training(
        self, model: ModelSize, tokens: float, logit_tokens: float, backward: Backward
    ) -> float:
        """Return seconds of passes forward and backward."""
        passes = 2 if backward.is_frozen else 3
        repeated = self.forward(model, tokens, 0) if backward.recomputes else 0.0
        return passes * self.forward(model, tokens, logit_tokens) + repeated

    def decoding(self, model: ModelSize) -> float:
        """Return seconds to sample one token for each sequence of a batch.

        Reading all weights from memory sets the time, because each weight takes part in few
        operations. In a small model, launching the kernels takes longer and sets the time.
        """
        size = BF16 if self.autocast else FP32
        assert self.gpu.bandwidth is not None
        read = size * model.multiplied / (PEAK_SHARE * self.gpu.bandwidth)
        return max(read, self.launching(model))

    def launching(self, model: ModelSize) -> float:
        """Return the minimum duration of a pass, in seconds."""
        return LAUNCHES * model.layers

    def optimizer(self, parameters: float) -> float:
        """Return seconds of an optimizer step on this number of parameters."""
        assert self.gpu.bandwidth is not None
        return FP32 * OPTIMIZER_NUMBERS * parameters / (PEAK_SHARE * self.gpu.bandwidth)

    def gathering(self, parameters: ParameterCount) -> float:
        """Return the seconds of an all-gather of sharded weights.

        In a ring, each process receives the shards of all other processes, and sends equally many
        bytes. With several machines, the slower of link and network sets the rate.
        """
        rates = [self.gpu.link, *([self.gpu.network] if self.machines > 1 else [])]
        rate = min(rate for rate in rates if rate is not None)
        received = FP32 * (parameters.layers + parameters.outside)
        return received * (1 - 1 / self.processes) / (LINK_SHARE * rate)

    def reducing(self, parameters: ParameterCount) -> float:
        """Return the seconds to sum gradients over the processes.

        An all-reduce is a reduce-scatter and an all-gather, so it takes twice as long as either.
        DeepSpeed's ZeRO-1 and ZeRO-2 use an all-reduce too (default
        use_multi_rank_bucket_allreduce).
        """
        return (1 if self.sharding in SHARD_WEIGHTS else 2) * self.gathering(parameters)

    @property
    def _operations(self) -> float:
        peak = self.gpu.bf16 if self.autocast else self.gpu.fp32
        assert peak is not None
        return PEAK_SHARE * peak


def missing_speeds(gpu: Gpu, processes: int, machines: int) -> list[str]:
    """Return the names of the unknown numbers of a GPU that are needed to compute a time."""
    numbers = {"bf16_tflops": gpu.bf16, "fp32_tflops": gpu.fp32, "gb_per_second": gpu.bandwidth}
    if processes > machines:
        numbers["link_gb_per_second"] = gpu.link
    if machines > 1:
        numbers["network_gb_per_second"] = gpu.network
    return [name for name, number in numbers.items() if number is None]


def ppo_seconds(
    size: PPOSize,
    schedule: Schedule,
    speed: Speed,
    *,
    epochs: int,
    mean_prompt: float,
    samples_here: bool,
) -> float:
    """Return the seconds of PPO if every response has its maximum length.

    The policy samples every response. Reference, critic and reward models each read every sequence
    once. Each PPO epoch trains policy and critic on every sequence. If a server samples, the time
    of the server is left out, and the policy reads every sequence once. The time to load
    models and to save checkpoints is left out.
    """
    policy, critic = size.policy, size.critic
    rows = schedule.batch_size / size.processes
    answered = rows * size.response_tokens
    tokens = rows * mean_prompt + answered
    batches = ceil(ceil(rows) / size.sampled_rows)

    def forward(model: ModelSize, tokens: float, logit_tokens: float) -> float:
        return max(speed.forward(model, tokens, logit_tokens), batches * speed.launching(model))

    sampling = forward(policy, tokens, answered)
    if samples_here:
        sampling = forward(policy, rows * mean_prompt, rows)
        sampling += batches * size.response_tokens * speed.decoding(policy)
    scoring = forward(policy, tokens, answered)
    scoring += sum(forward(model, tokens, 0) for model in size.rewards)
    backward = Backward(recomputes=size.recomputes, is_frozen=bool(size.adapter))
    passes = ceil(ceil(rows) / rows_of_a_pass(size))
    training = _training(speed, policy, tokens, answered, backward, passes)
    if critic is not None:
        scoring += forward(critic, tokens, 0)
        own = replace(backward, is_frozen=False)
        training += _training(speed, critic, tokens, 0, own, passes)
    shards = 1 if size.sharding in ("none", "ddp") else size.processes
    steps = schedule.steps_per_update * speed.optimizer(size.trained / shards)
    exchange = ppo_exchange_seconds(
        size,
        speed,
        batch_rows=rows,
        step_rows=rows * epochs / schedule.steps_per_update,
        steps=schedule.steps_per_update,
        samples_here=samples_here,
    )
    return schedule.num_updates * (sampling + scoring + epochs * training + steps + exchange)


def supervised_seconds(
    size: SupervisedSize,
    speed: Speed,
    *,
    tokens: int,
    counted: int,
    optimizer_steps: int,
    passes: float,
) -> float:
    """Return the seconds of a supervised training on `tokens` tokens in all epochs together.

    `counted` of these tokens have a loss of the LM head. `passes` is the mean number of passes of a
    process in an optimizer step.
    """
    own, logit_tokens = tokens / size.processes, counted / size.processes
    shards = 1 if size.sharding in ("none", "ddp") else size.processes
    backward = Backward(recomputes=size.recomputes, is_frozen=bool(size.adapter))
    number = optimizer_steps * passes
    training = _training(speed, size.model, own, logit_tokens, backward, number)
    exchange = supervised_exchange_seconds(size, speed, passes=passes, steps=optimizer_steps)
    return training + exchange + optimizer_steps * speed.optimizer(size.trained / shards)


def _training(
    speed: Speed,
    model: ModelSize,
    tokens: float,
    logit_tokens: float,
    backward: Backward,
    passes: float,
) -> float:
    """Return seconds of `passes` forward and backward passes, with `tokens` tokens in all."""
    ways = 3 if backward.recomputes else 2
    seconds = speed.training(model, tokens, logit_tokens, backward)
    return max(seconds, ways * passes * speed.launching(model))


def describe_seconds(seconds: float) -> str:
    """Return a duration as text, rounded to a suitable unit."""
    if seconds < 90:
        return f"{ceil(seconds)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _products(model: ModelSize, tokens: float, logit_tokens: float) -> float:
    """Return the number of multiplications of tokens and weights in a forward pass."""
    layers = model.parameters - model.outside_layers
    return layers * tokens + model.width * model.vocabulary * logit_tokens
