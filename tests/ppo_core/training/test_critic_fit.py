"""A critic of an earlier run is fitted to the rewards of this run on the rollouts it came with."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompt_set import make_run_prompts
from ppo_core.data.types import Rollout
from ppo_core.models.files.critic_files import load_critic
from ppo_core.models.files.rollout_files import read_rollouts
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.reward_functions import score_tokens
from ppo_core.ppo.scoring import critic_values
from ppo_core.training.critic_fit import NUM_EPOCHS, NUM_KEPT, CriticFit
from ppo_core.training.model_setup import join_processes, set_up_models
from ppo_core.training.trainer import Trainer
from tests.helpers.models.tiny import VOCABULARY, make_classifier, make_policy, make_tokenizer
from tests.helpers.runs.forked_python import run_python
from tests.ppo_core.training.test_trainer import CONFIG, PROMPTS

SETTINGS = PPOConfig(
    **{
        **asdict(CONFIG),
        "total_episodes": 8 * (NUM_KEPT + 1),
        "batch_size": 8,
        "whiten_rewards": False,
        "lr_scheduler_type": "linear",
        "save_total_limit": 20,
    }
)


def make_trainer(
    settings: PPOConfig = SETTINGS,
    *,
    critic: Path | None = None,
    rollouts: Sequence[Rollout] | None = None,
    reward: object = None,
    **options: object,
) -> Trainer:
    """Return a trainer that starts from the critic and the rollouts in a folder."""
    tokenizer, policy = make_tokenizer(), make_policy()
    config, engine = join_processes(settings, policy)
    models = set_up_models(
        config,
        tokenizer,
        engine,
        policy=policy,
        critic=None if critic is None else load_critic(critic),
        reference=make_policy(),
        reward=reward or RewardModel(make_classifier(seed=1), tokenizer, bias=-3.0),
    )
    if rollouts is None and critic is not None:
        rollouts = read_rollouts(critic, VOCABULARY)
    prompts = make_run_prompts(PROMPTS, None, tokenizer, policy, config)
    return Trainer(
        config, models, prompts, engine=engine, earlier_rollouts=rollouts or (), **options
    )


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a critic that an earlier run has trained with another reward."""
    folder = tmp_path_factory.mktemp("earlier") / "critic"
    reward = RewardModel(make_classifier(), make_tokenizer())
    trainer = make_trainer(keeps_rollouts=True, reward=reward)
    trainer.train()
    trainer.save_critic(folder)
    return folder


def test_a_run_keeps_its_first_rollouts_and_no_later_ones(earlier: Path):
    rollouts = read_rollouts(earlier, VOCABULARY)
    assert [len(each) for each in rollouts] == [8] * NUM_KEPT
    trainer = make_trainer(reward=RewardModel(make_classifier(), make_tokenizer()))
    seen = []
    trainer._finish_update, finish = (
        lambda pending, sums: seen.append(pending.experience.rollout) or finish(pending, sums),
        trainer._finish_update,
    )
    trainer.train()
    for kept, own in zip(rollouts, seen[:NUM_KEPT], strict=True):
        for name, value in vars(kept).items():
            if name not in ("logprobs", "behavior_logprobs"):
                assert_close(value, getattr(own, name))


def test_the_targets_are_the_shaped_scores_discounted_from_the_last_token(earlier: Path):
    trainer = make_trainer(replace(SETTINGS, gamma=0.9), critic=earlier)
    (rollout, *_) = read_rollouts(earlier, VOCABULARY)
    fit = CriticFit(
        config=trainer.config,
        engine=trainer.engine,
        rewards=trainer.rewards,
        train_state=trainer._train_state,
    )
    experience = fit._experience(rollout)
    scores = score_tokens(trainer.rewards.models()[0], rollout, 8)
    scores = scores - (~rollout.has_stop).float()  # missing_eos_penalty=1.0
    for b, length in enumerate(rollout.response_lengths.tolist()):
        expected = [float(scores[b]) * 0.9 ** (length - 1 - t) for t in range(length)]
        assert_close(experience.returns[b, :length], torch.tensor(expected))
        assert not experience.returns[b, length:].any()


def squared_error(trainer: Trainer, rollouts: Sequence[Rollout]) -> float:
    """Return the critic's mean squared error against the shaped scores."""
    errors = []
    for rollout in rollouts:
        scores = score_tokens(trainer.rewards.models()[0], rollout, 8)
        scores = scores - (~rollout.has_stop).float()
        values = critic_values(trainer.critic, rollout, 8)
        errors.append((values - scores[:, None])[rollout.response_mask] ** 2)
    return float(torch.cat(errors).mean())


def test_the_fit_trains_the_critic_alone_and_leaves_the_schedule_as_it_was(earlier: Path):
    settings = replace(SETTINGS, warmup_ratio=0.5)
    trainer = make_trainer(settings, critic=earlier)
    rollouts = read_rollouts(earlier, VOCABULARY)
    state, policy = trainer._train_state, make_policy().state_dict()
    before, schedule = squared_error(trainer, rollouts), state.scheduler.state_dict()
    rates = [group["lr"] for group in state.optimizer.param_groups]
    assert rates[0] == 0.0  # a warm-up begins at 0, and the fit must not
    trainer._fit_critic()
    assert squared_error(trainer, rollouts) < 0.5 * before
    assert_close(trainer.policy.model.state_dict(), policy, rtol=0, atol=0)
    assert state.scheduler.state_dict() == schedule
    assert [group["lr"] for group in state.optimizer.param_groups] == rates
    assert not any(state.optimizer.state.values())
    assert trainer._run.critic_is_fitted


def test_a_rollout_with_a_score_that_is_not_finite_is_left_out(earlier: Path, monkeypatch):
    trainer, calls = make_trainer(critic=earlier), []
    total = trainer.rewards.total

    def broken_once(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(parts)
        return total(parts) * (float("nan") if len(calls) == 1 else 1.0)

    monkeypatch.setattr(trainer.rewards, "total", broken_once)
    trainer._fit_critic()
    assert len(calls) == NUM_KEPT
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.critic.parameters())
    assert trainer._train_state.skipped_steps == 0


def test_a_function_as_reward_is_named_and_nothing_is_fitted(earlier: Path, caplog):
    def length(prompts: list[str], responses: list[str]) -> list[float]:
        return [len(response) for response in responses]

    trainer = make_trainer(critic=earlier, reward=length)
    with caplog.at_level(logging.WARNING):
        trainer._fit_critic()
    assert "The critic is not fitted" in caplog.text
    fresh = load_critic(earlier)
    assert_close(trainer.critic.state_dict(), fresh.state_dict(), rtol=0, atol=0)


def test_a_resumed_run_neither_fits_again_nor_loses_a_kept_rollout(earlier: Path, tmp_path: Path):
    settings = replace(SETTINGS, save_strategy="steps", save_steps=1)

    def trainer(name: str) -> Trainer:
        config = replace(settings, output_dir=str(tmp_path / name))
        return make_trainer(config, critic=earlier, keeps_rollouts=True)

    whole, first = trainer("whole"), trainer("parts")
    whole.train()
    first.train(stop_after_updates=3)
    second = trainer("parts")
    second.train(resume_from_checkpoint=True)
    for run, name in ((whole, "whole"), (second, "parts")):
        run.save_critic(tmp_path / name / "critic")
    for file in ("model.safetensors", "value_head.safetensors", "first_rollouts.safetensors"):
        one, other = (tmp_path / name / "critic" / file for name in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes(), file


FITTED = """
import sys
from pathlib import Path
from dataclasses import replace
from safetensors.torch import save_file
from tests.ppo_core.training.test_critic_fit import SETTINGS, make_trainer

earlier, result, sharding = sys.argv[1:]
trainer = make_trainer(replace(SETTINGS, sharding=sharding or None), critic=Path(earlier))
trainer._fit_critic()
tensors = trainer.engine.full_state_dict(trainer.engine.unwrap(trainer._train_state.module))
if tensors is not None:
    save_file({name: value.clone() for name, value in tensors.items()}, result)
"""


@pytest.mark.parametrize(
    "sharding", ["ddp", "fsdp2", pytest.param("zero3", marks=pytest.mark.slow)]
)
def test_two_processes_fit_the_critic_of_one(earlier: Path, tmp_path: Path, sharding: str):
    found = {}
    for processes, how in ((1, ""), (2, sharding)):
        file = tmp_path / f"{processes}.safetensors"
        done = run_python("-c", FITTED, earlier, file, how, processes=processes)
        assert done.codes == [0] * processes, done.stderr[-3000:]
        found[processes] = load_file(file)
    assert_close(found[1], found[2], rtol=0, atol=1e-5)


def test_epochs_and_rollouts_are_those_of_the_documentation():
    assert (NUM_KEPT, NUM_EPOCHS) == (5, 4)
