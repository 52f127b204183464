"""How many episodes and steps a run has, and the learning rate of each."""

import pytest
import torch
from torch import nn

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.ppo.schedule import CRITIC, POLICY, make_schedule, make_scheduler


def make_config(**changes) -> PPOConfig:
    """Ten optimizer steps: 5 updates of 2."""
    settings = {"total_episodes": 40, "batch_size": 8, "num_ppo_epochs": 2, "learning_rate": 1.0}
    return PPOConfig(**{**settings, **changes})


def make_optimizer(*, critic_rate: float = 1.0, names=(POLICY, CRITIC)) -> torch.optim.Optimizer:
    rates = (1.0, critic_rate)
    groups = [
        {"name": name, "params": [nn.Parameter(torch.ones(1))], "lr": rate}
        for name, rate in zip(names, rates, strict=True)
    ]
    return torch.optim.SGD(groups)


def rates(config: PPOConfig, **settings) -> dict[str, list[float]]:
    """The learning rates of each optimizer step, by the name of the group."""
    optimizer = make_optimizer(**settings)
    schedule = make_schedule(config, num_prompts=8, num_processes=1)
    scheduler = make_scheduler(optimizer, config, schedule)
    seen: dict[str, list[float]] = {POLICY: [], CRITIC: []}
    for _ in range(schedule.num_optimizer_steps):
        for group in optimizer.param_groups:
            seen[group["name"]].append(group["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_a_batch_is_what_all_processes_take_in_all_their_passes():
    config = PPOConfig(per_device_train_batch_size=3, gradient_accumulation_steps=4)
    assert make_schedule(config, num_prompts=5, num_processes=2).batch_size == 3 * 4 * 2


def test_a_batch_size_that_is_set_is_over_all_processes():
    config = PPOConfig(batch_size=12, per_device_train_batch_size=5)
    assert make_schedule(config, num_prompts=5, num_processes=2).batch_size == 12


@pytest.mark.parametrize(
    ("epochs", "prompts", "updates"), [(0.5, 40, 3), (1.5, 40, 8), (0.01, 40, 1), (3.0, 8, 3)]
)
def test_passes_over_the_prompts_may_be_a_fraction_and_updates_are_whole(epochs, prompts, updates):
    # TRL #1740, #1743. 0.5 x 40 = 20 episodes are 2.5 batches of 8: three.
    config = PPOConfig(batch_size=8, num_train_epochs=epochs)
    schedule = make_schedule(config, num_prompts=prompts, num_processes=1)
    assert (schedule.num_updates, schedule.total_episodes) == (updates, 8 * updates)


def test_episodes_that_are_set_take_the_place_of_passes():
    config = PPOConfig(batch_size=8, num_train_epochs=100, total_episodes=17)
    schedule = make_schedule(config, num_prompts=40, num_processes=1)
    assert (schedule.num_updates, schedule.total_episodes) == (3, 24)


def test_optimizer_steps_are_passes_times_minibatches_times_updates():
    config = make_config(num_ppo_epochs=3, num_mini_batches=4)
    schedule = make_schedule(config, num_prompts=8, num_processes=1)
    assert (schedule.steps_per_update, schedule.num_optimizer_steps) == (12, 60)


def test_a_batch_that_cannot_be_split_into_minibatches_is_refused():
    config = PPOConfig(num_mini_batches=3, per_device_train_batch_size=5)
    with pytest.raises(ConfigError, match=r"batch of 10 .* num_mini_batches=3: 1 responses"):
        make_schedule(config, num_prompts=8, num_processes=2)


def test_a_batch_smaller_than_the_number_of_processes_is_refused():
    with pytest.raises(ConfigError, match=r"batch of 2 .* processes, 3, .* Raise batch_size"):
        make_schedule(PPOConfig(batch_size=2), num_prompts=8, num_processes=3)


def test_the_rate_falls_to_zero_at_the_end_of_the_run():
    expected = [1 - step / 10 for step in range(10)]
    assert rates(make_config())[POLICY] == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 4}, {"warmup_ratio": 0.4}])
def test_the_rate_rises_in_the_warm_up_and_falls_from_there(warmup):
    expected = [0, 1 / 4, 2 / 4, 3 / 4, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert rates(make_config(**warmup))[POLICY] == pytest.approx(expected)


def test_the_policy_stays_while_the_critic_warms_up():
    # Two updates of two steps; then both are where the course is by then.
    config = make_config(critic_warmup_updates=2)
    course = [1 - step / 10 for step in range(10)]
    of_groups = rates(config, critic_rate=0.5)
    assert of_groups[POLICY] == pytest.approx([0, 0, 0, 0, *course[4:]])
    assert of_groups[CRITIC] == pytest.approx([0.5 * rate for rate in course])


def test_a_critic_that_warms_up_needs_groups_that_tell_it_from_the_policy():
    with pytest.raises(ConfigError, match="critic_warmup_updates=1 needs an optimizer"):
        rates(make_config(critic_warmup_updates=1), names=("all", "else"))
