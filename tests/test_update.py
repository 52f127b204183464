"""The update: one optimizer step against autograd on the whole batch, and what must not matter."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from ppo_core.config import PPOConfig
from ppo_core.engine import Engine
from ppo_core.losses import policy_loss, value_loss
from ppo_core.models import ActorCritic, Critic, LanguageModel
from ppo_core.records import Experience
from ppo_core.update import Trainee, update_policy
from tests.test_models import make_rollout, row_of
from tests.tiny import make_policy

LENGTHS = (5, 1, 3, 5, 2, 4, 1, 1)


def make_config(**changes) -> PPOConfig:
    settings = {
        "batch_size": 8,
        "total_episodes": 8,
        "num_ppo_epochs": 1,
        "per_device_train_batch_size": 8,
    }
    return PPOConfig(**{**settings, "max_grad_norm": 1e9, **changes})


def make_experience(*, seed=0) -> Experience:
    """Old log-probabilities near the policy's own, so that some tokens are clipped."""
    rollout = make_rollout((3, 7, 1, 2, 6, 4, 5, 2), LENGTHS, seed=seed)
    policy = LanguageModel(make_policy())
    mask = rollout.response_mask
    with torch.no_grad():
        logprobs, _ = policy(rollout.token_rows(torch.arange(8)), rollout.temperature)
    noise = 0.3 * torch.randn(len(logprobs))
    old = torch.zeros(mask.shape).masked_scatter(mask, logprobs + noise)
    rollout = dataclasses.replace(rollout, logprobs=old)
    draw = [torch.where(mask, torch.randn(mask.shape), 0) for _ in range(3)]
    return Experience(
        rollout=rollout,
        values=draw[0],
        ref_logprobs=torch.where(mask, old + 0.1 * torch.randn(mask.shape), 0),
        advantages=draw[1],
        returns=draw[2],
    )


def make_trainee(learning_rate=0.1) -> Trainee:
    critic = Critic.from_policy(make_policy(seed=5))
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    module = ActorCritic(LanguageModel(make_policy()), critic)
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return Trainee(module=module, optimizer=optimizer, scheduler=scheduler)


def weights_after(config: PPOConfig, experience: Experience, trainee: Trainee | None = None):
    trainee = trainee or make_trainee()
    sums = update_policy(
        trainee, experience, config, Engine(), torch.Generator().manual_seed(config.seed)
    )
    return {name: p.detach() for name, p in trainee.module.named_parameters()}, sums


def test_one_step_is_plain_autograd_on_the_mean_over_all_counted_tokens():
    config, experience = make_config(per_device_train_batch_size=3), make_experience()
    actual, sums = weights_after(config, experience)

    trainee, rollout = make_trainee(), experience.rollout
    policy_losses, value_losses = [], []
    for b in range(8):
        row, start = torch.tensor(row_of(rollout, b)), int(rollout.prompt_lengths[b])
        tokens = slice(0, int(rollout.response_lengths[b]))
        logits = trainee.module.policy.model(row[None]).logits[0, start - 1 : -1]
        logprobs = torch.log_softmax(logits / rollout.temperature, -1)
        logprobs = logprobs.gather(1, row[start:, None])[:, 0]
        hidden = trainee.module.critic.backbone(row[None]).last_hidden_state[0, start - 1 : -1]
        values = trainee.module.critic.head(hidden)[:, 0]
        policy_losses.append(
            policy_loss(
                logprobs,
                rollout.logprobs[b, tokens],
                experience.advantages[b, tokens],
                cliprange=0.2,
            )[0]
        )
        value_losses.append(
            value_loss(
                values,
                experience.values[b, tokens],
                experience.returns[b, tokens],
                cliprange_value=0.2,
            )[0]
        )
    policy_mean, value_mean = torch.cat(policy_losses).mean(), torch.cat(value_losses).mean()
    (policy_mean + 0.1 * value_mean).backward()
    trainee.optimizer.step()

    for name, parameter in trainee.module.named_parameters():
        assert_close(actual[name], parameter.detach(), rtol=0, atol=1e-6, msg=name)
    assert sums.tokens == sum(LENGTHS)
    assert sums.policy_loss / sums.tokens == pytest.approx(policy_mean.item(), abs=1e-6)
    assert sums.value_loss / sums.tokens == pytest.approx(value_mean.item(), abs=1e-6)


@pytest.mark.parametrize("per_device_train_batch_size", [1, 3])
def test_the_microbatch_size_changes_nothing(per_device_train_batch_size):
    experience = make_experience()
    whole, _ = weights_after(make_config(num_ppo_epochs=2, num_mini_batches=2), experience)
    split, _ = weights_after(
        make_config(
            num_ppo_epochs=2,
            num_mini_batches=2,
            per_device_train_batch_size=per_device_train_batch_size,
        ),
        experience,
    )
    for name, weight in whole.items():
        assert_close(split[name], weight, rtol=0, atol=1e-6, msg=name)


def test_every_pass_steps_once_a_minibatch_and_sees_every_response_once(monkeypatch):
    trainee, steps = make_trainee(), []
    plain = trainee.optimizer.step
    monkeypatch.setattr(trainee.optimizer, "step", lambda: steps.append(1) or plain())
    _, sums = weights_after(
        make_config(num_ppo_epochs=3, num_mini_batches=4, per_device_train_batch_size=1),
        make_experience(),
        trainee,
    )
    assert len(steps) == 12
    assert sums.tokens == 3 * sum(LENGTHS)
    assert trainee.scheduler.last_epoch == 12


def test_the_order_is_new_in_every_pass(monkeypatch):
    orders = []
    plain = torch.randperm

    def randperm(*args, **settings):
        orders.append(plain(*args, **settings))
        return orders[-1]

    monkeypatch.setattr(torch, "randperm", randperm)
    weights_after(make_config(num_ppo_epochs=2), make_experience())
    assert len(orders) == 2
    assert orders[0].tolist() != orders[1].tolist()


def test_the_critic_learns_and_so_does_the_policy():
    before = {name: p.detach().clone() for name, p in make_trainee().module.named_parameters()}
    after, _ = weights_after(make_config(), make_experience())
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"policy", "critic"}


def test_gradients_are_scaled_down_to_the_norm_that_is_set():
    before = {name: p.detach().clone() for name, p in make_trainee(1.0).module.named_parameters()}
    after, _ = weights_after(make_config(max_grad_norm=0.01), make_experience(), make_trainee(1.0))
    squares = sum(((after[name] - before[name]) ** 2).sum() for name in before)
    # At a learning rate of 1, SGD moves by exactly the gradient.
    assert squares.sqrt().item() == pytest.approx(0.01, rel=1e-3)


def test_the_ratio_is_one_before_the_policy_moves():
    experience = make_experience()
    trainee = make_trainee()
    rollout = experience.rollout
    with torch.no_grad():
        logprobs, _ = trainee.module.policy(rollout.token_rows(torch.arange(8)), 0.7)
    old = torch.zeros(rollout.logprobs.shape).masked_scatter(rollout.response_mask, logprobs)
    fresh = dataclasses.replace(experience, rollout=dataclasses.replace(rollout, logprobs=old))
    _, sums = weights_after(make_config(num_ppo_epochs=3), fresh, trainee)
    assert sums.first_tokens == sum(LENGTHS)
    assert sums.first_ratio_error / sums.first_tokens < 1e-5
    assert abs(sums.ratio_error) > 1e-3


def test_a_gradient_that_is_not_finite_moves_nothing():
    experience = make_experience()
    experience.advantages[0, 0] = torch.inf
    trainee = make_trainee()
    before = {name: p.detach().clone() for name, p in trainee.module.named_parameters()}
    weights_after(make_config(), experience, trainee)
    assert (trainee.skipped_steps, trainee.skipped_in_a_row) == (1, 1)
    for name, parameter in trainee.module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_nothing_behind_the_end_of_a_response_is_learned_from():
    experience = make_experience()
    spoilt = dataclasses.replace(
        experience,
        **{
            name: torch.where(
                experience.rollout.response_mask, getattr(experience, name), torch.nan
            )
            for name in ("values", "advantages", "returns")
        },
    )
    clean, _ = weights_after(make_config(), experience)
    dirty, _ = weights_after(make_config(), spoilt)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)
