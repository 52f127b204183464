"""Training without a critic: a step by plain autograd, what a run makes, saves and refuses."""

import dataclasses
import re

import pytest
import torch
from torch.testing import assert_close

from ppo_core import PPOConfig
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.models.model_with_value_head import AutoModelForCausalLMWithValueHead
from ppo_core.models.reward_model import RewardModel
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer

PROMPTS = [f"w{i} w{(3 * i) % 50}" for i in range(12)]
ESTIMATORS = {
    "reinforce": {},
    "rloo": {"samples_per_prompt": 4},
    "grpo": {"samples_per_prompt": 2},
}


def settings(estimator: str, **changes) -> PPOConfig:
    small = {
        "total_episodes": 16,
        "batch_size": 8,
        "per_device_train_batch_size": 3,
        "response_length": 6,
        "temperature": 1.0,
        "learning_rate": 1e-2,
        "stop_token_id": 9,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    given = small | ESTIMATORS.get(estimator, {}) | changes
    return PPOConfig(advantage_estimator=estimator, **given)


def make_trainer(config: PPOConfig, **changes) -> PPOTrainer:
    parts = {
        "processing_class": make_tokenizer(),
        "model": make_policy(),
        "ref_model": make_policy(seed=3),
        "reward_model": RewardModel(make_classifier(), make_tokenizer()),
        "train_dataset": PROMPTS,
        **changes,
    }
    return PPOTrainer(config, **parts)


def token_logprobs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + response])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def advantages_by_hand(estimator: str, rewards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Advantages from the rewards of each response's tokens, written down again from the papers."""
    if estimator == "reinforce":
        to_go = [reward.flip(0).cumsum(0).flip(0) for reward in rewards]
        everything = torch.cat(to_go)
        return [(each - everything.mean()) / everything.std() for each in to_go]
    totals = torch.stack([reward.sum() for reward in rewards])
    group, found = ESTIMATORS[estimator]["samples_per_prompt"], []
    for n, total in enumerate(totals):
        first = n - n % group
        own = totals[first : first + group]
        if estimator == "rloo":
            found.append(total - (own.sum() - total) / (group - 1))
        else:
            found.append((total - own.mean()) / (own.std() + 1e-4))
    return [advantage.expand(len(reward)) for advantage, reward in zip(found, rewards, strict=True)]


def rows(tensor: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(tensor, lengths, strict=True)]


def gradient_by_hand(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """The gradient of the first optimizer step of a run, by plain autograd on each response."""
    config, policy, reference = trainer.config, make_policy(), make_policy(seed=3)
    batch = trainer._draw_prompts()
    rollout = trainer._sample(batch)
    prompts = rows(rollout.prompt_ids, rollout.prompt_lengths)
    responses = rows(rollout.response_ids, rollout.response_lengths)
    group = config.samples_per_prompt
    assert all(prompt == prompts[n - n % group] for n, prompt in enumerate(prompts))
    assert len(set(map(tuple, prompts))) == len(prompts) // group
    pairs = list(zip(prompts, responses, strict=True))
    logprobs = [token_logprobs(policy, *pair) for pair in pairs]
    rewards = []
    scores = trainer._score(rollout, batch).scores
    for pair, own, score in zip(pairs, logprobs, scores, strict=True):
        reward = -config.kl_coef * (own - token_logprobs(reference, *pair)).detach()
        reward[-1] += score
        rewards.append(reward)
    advantages = advantages_by_hand(config.advantage_estimator, rewards)
    # At the policy that sampled, every ratio is 1, and the gradient is that of -A log p.
    losses = [-(a * p).sum() for a, p in zip(advantages, logprobs, strict=True)]
    (torch.stack(losses).sum() / sum(map(len, responses))).backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_optimizer_step_is_that_of_plain_autograd(estimator: str):
    config = settings(estimator, num_ppo_epochs=1, total_episodes=8, max_grad_norm=1e9)
    expected = gradient_by_hand(make_trainer(config))
    policy, start = make_policy(), make_policy()
    # With a learning rate of 1, a step of SGD subtracts the gradient.
    sgd = torch.optim.SGD(policy.parameters(), lr=1.0)
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)
    make_trainer(config, model=policy, optimizers=(sgd, constant)).step()
    for (name, before), after in zip(start.named_parameters(), policy.parameters(), strict=True):
        assert_close(before - after, expected[name], rtol=1e-3, atol=1e-5, msg=name)


# --- What a run makes, saves and resumes ---


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_critic_is_made_logged_or_saved_and_the_run_resumes_exactly(estimator: str, tmp_path):
    config = settings(
        estimator, save_strategy="steps", save_steps=1, output_dir=str(tmp_path / "whole")
    )
    whole = make_trainer(config)
    history = whole.train()
    assert whole.critic is None
    assert whole.value_model is None
    assert not [name for name in history[0] if "value" in name or "variance" in name]
    assert "val/ratio" in history[0]
    saved = [path.name for path in (tmp_path / "whole" / "checkpoint-1").iterdir()]
    assert any("optimizer" in name for name in saved)
    assert not any("critic" in name for name in saved)
    again = make_trainer(config)
    resumed = again.train(tmp_path / "whole" / "checkpoint-1")
    assert len(resumed) == 1
    for name, weight in whole.policy.model.state_dict().items():
        assert torch.equal(again.policy.model.state_dict()[name], weight), name


def test_a_checkpoint_with_a_critic_is_not_continued_without_one(tmp_path):
    folder = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    make_trainer(settings("gae", **folder)).train()
    with pytest.raises(TrainingError, match="advantage_estimator='gae', which is now 'reinforce'"):
        make_trainer(settings("reinforce", **folder)).train(tmp_path / "checkpoint-1")


def test_a_checkpoint_of_a_version_without_estimators_is_continued(tmp_path):
    folder = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    written = make_trainer(settings("gae", **folder))._checkpoints
    recent = written._contents.fingerprint
    older = {
        name: value
        for name, value in recent.settings.items()
        if name not in ("advantage_estimator", "samples_per_prompt", "scale_by_group_std")
    }
    assert len(older) == len(recent.settings) - 3
    assert older["whiten_advantages"] is True
    assert not recent.differences(dataclasses.asdict(recent) | {"settings": older})


def test_the_pass_over_the_prompts_takes_several_samples_of_each():
    trainer = make_trainer(settings("rloo", total_episodes=None, num_train_epochs=2))
    assert trainer.schedule.total_episodes == 2 * 4 * len(PROMPTS)


def test_several_samples_of_a_prompt_also_go_with_a_critic():
    trainer = make_trainer(settings("gae", samples_per_prompt=4))
    batch = trainer._draw_prompts()
    assert [batch.rows.count(row) for row in dict.fromkeys(batch.rows)] == [4, 4]
    responses = trainer._sample(batch).response_ids.tolist()
    assert len(set(map(tuple, responses))) > 4
    assert "val/explained_variance" in trainer.train()[0]


# --- What is refused ---


@pytest.mark.parametrize(
    ("estimator", "changes", "message"),
    [
        ("rloo", {"samples_per_prompt": 1}, "samples_per_prompt=1 gives each prompt only one"),
        (
            "rloo",
            {"samples_per_prompt": 3},
            "8 responses is not a multiple of samples_per_prompt=3",
        ),
        ("rloo", {"gamma": 0.9}, "gamma=0.9 has no effect with advantage_estimator='rloo'"),
        ("grpo", {"whiten_rewards": True}, "whiten_rewards=True has no effect"),
        ("rloo", {"scale_by_group_std": False}, "scale_by_group_std=False has no effect"),
        ("reinforce", {"lam": 0.9}, "lam=0.9 has no effect"),
        ("reinforce", {"vf_coef": 1.0}, "vf_coef=1.0 has no effect"),
        ("grpo", {"shared_critic": True}, "shared_critic=True has no effect"),
        ("grpo", {"critic_warmup_updates": 1}, "critic_warmup_updates=1 has no effect"),
        ("ppo", {}, "advantage_estimator"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(estimator: str, changes: dict, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_trainer(settings(estimator, **changes))


@pytest.mark.parametrize(
    "models",
    [
        {"value_model": make_classifier},
        {"model": lambda: AutoModelForCausalLMWithValueHead(make_policy())},
    ],
)
def test_a_value_model_that_would_not_train_is_refused(models: dict):
    given = {name: make() for name, make in models.items()}
    with pytest.raises(ConfigError, match="trains no critic, and the run has a"):
        make_trainer(settings("reinforce"), **given)
