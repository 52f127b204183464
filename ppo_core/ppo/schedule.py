"""The numbers of episodes, updates and optimizer steps of a run, and its learning rate schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError

POLICY, CRITIC = "policy", "critic"
"""Names of the parameter groups of policy and critic."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The sizes of a run."""

    batch_size: int
    """Number of responses per update, over all processes."""

    num_updates: int
    """Number of PPO updates in the run."""

    steps_per_update: int
    """Number of optimizer steps per update."""

    @property
    def total_episodes(self) -> int:
        """Number of responses in the run, a multiple of `batch_size`."""
        return self.num_updates * self.batch_size

    @property
    def num_optimizer_steps(self) -> int:
        """Number of optimizer steps in the run."""
        return self.num_updates * self.steps_per_update

    def between(self, number: int) -> list[int]:
        """Return `number` counts of updates that split the run into `number` + 1 similar parts."""
        return [(1 + n) * self.num_updates // (1 + number) for n in range(number)]


@dataclass(frozen=True)
class BatchSplit:
    """How a batch is split: consistent values of the settings with these names."""

    batch_size: int
    num_mini_batches: int
    mini_batch_size: int


def batch_sizes(config: PPOConfig, num_processes: int) -> BatchSplit:
    """Return consistent values of the settings of a batch for a number of processes.

    Raises:
        ConfigError: two settings contradict each other, or a batch cannot be split evenly into
            minibatches, or into prompts with `samples_per_prompt` responses each.
    """
    product = (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * num_processes
    )
    batch_size = config.batch_size or product
    if config.gradient_accumulation_steps != 1 and batch_size != product:
        raise ConfigError(
            f"batch_size={batch_size} contradicts gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps}: per_device_train_batch_size="
            f"{config.per_device_train_batch_size} x {config.gradient_accumulation_steps} x "
            f"{num_processes} processes = {product}. Leave batch_size or "
            "gradient_accumulation_steps at its default."
        )
    if left := batch_size % config.samples_per_prompt:
        raise ConfigError(
            f"A batch of {batch_size} responses is not a multiple of samples_per_prompt="
            f"{config.samples_per_prompt}: {left} responses would be left over. Set batch_size to "
            "a multiple of samples_per_prompt."
        )
    number = config.num_mini_batches
    size = config.mini_batch_size or batch_size // number
    if config.mini_batch_size is not None and number == 1 and batch_size % size == 0:
        number = batch_size // size
    if left := batch_size % number:
        raise ConfigError(
            f"A batch of {batch_size} responses cannot be split evenly into num_mini_batches="
            f"{number}: {left} responses would be left over. Set batch_size to a multiple of "
            "num_mini_batches."
        )
    if size * number != batch_size:
        raise ConfigError(
            f"A batch of {batch_size} responses cannot be split evenly into num_mini_batches="
            f"{number} of mini_batch_size={size}. Set only one of them, to a divisor of batch_size."
        )
    return BatchSplit(batch_size, number, size)


def make_schedule(config: PPOConfig, *, num_prompts: int, num_processes: int) -> Schedule:
    """Compute the sizes of a run from settings, prompts and processes.

    Raises:
        ConfigError: see `batch_sizes`; a batch is smaller than the number of processes, the
            critic's warmup takes all updates, or there are too few updates for `save_policies`.
    """
    sizes = batch_sizes(config, num_processes)
    batch_size = sizes.batch_size
    if batch_size < num_processes:
        raise ConfigError(
            f"A batch of {batch_size} responses is smaller than the number of processes, "
            f"{num_processes}, so some processes would have nothing to do. Raise batch_size, or "
            "start fewer processes."
        )
    # num_train_epochs may be fractional, but the number of episodes is an integer (TRL #1740,
    # #1743).
    passes = config.num_train_epochs * config.samples_per_prompt
    episodes = config.total_episodes or ceil(passes * num_prompts)
    num_updates = ceil(episodes / batch_size)
    if config.max_steps != -1 and (config.total_episodes is None or config.max_steps < num_updates):
        num_updates = config.max_steps
    if config.critic_warmup_updates >= num_updates:
        raise ConfigError(
            f"critic_warmup_updates={config.critic_warmup_updates} leaves no update for the policy "
            f"in a run of {num_updates} updates. Lower critic_warmup_updates, or raise "
            "total_episodes."
        )
    if config.save_policies >= num_updates:
        raise ConfigError(
            f"save_policies={config.save_policies} needs more updates: a run of {num_updates} "
            f"updates has only {num_updates - 1} updates before its end. Lower save_policies, or "
            "raise total_episodes."
        )
    return Schedule(
        batch_size=batch_size,
        num_updates=num_updates,
        steps_per_update=config.num_ppo_epochs * sizes.num_mini_batches,
    )


def make_scheduler(optimizer: Optimizer, config: PPOConfig, schedule: Schedule) -> LRScheduler:
    """Return the scheduler of the run's learning rates.

    During the critic's warmup the policy's rate is 0, so AdamW leaves the policy unchanged.

    Raises:
        ConfigError: `critic_warmup_updates` is set, and a parameter group of the optimizer has a
            name other than POLICY and CRITIC, or no name.
    """
    steps = schedule.num_optimizer_steps
    is_share = config.warmup_steps < 1
    share = config.warmup_steps or config.warmup_ratio
    warmup = ceil(share * steps) if is_share else config.warmup_steps
    course = get_scheduler(config.lr_scheduler_type, optimizer, int(warmup), steps)
    warmed_up = config.critic_warmup_updates * schedule.steps_per_update
    if not warmed_up:
        return course
    if any(group.get("name") not in (POLICY, CRITIC) for group in optimizer.param_groups):
        raise ConfigError(
            f"critic_warmup_updates={config.critic_warmup_updates} needs an optimizer whose "
            f"parameter groups have the names {POLICY!r} and {CRITIC!r}. Otherwise the policy "
            "would train during the warmup. Name the groups, or set optimizers=(None, None)."
        )
    factor: Callable[[int], float] = course.lr_lambdas[0]

    def of_policy(step: int) -> float:
        return factor(step) if step >= warmed_up else 0.0

    by_name = {POLICY: of_policy, CRITIC: factor}
    return LambdaLR(optimizer, [by_name[group["name"]] for group in optimizer.param_groups])
