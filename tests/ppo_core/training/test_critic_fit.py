"""A critic of an earlier run is fitted to the rewards of this run on the rollouts it came with."""

import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompt_set import make_run_prompts
from ppo_core.data.types import Rollout
from ppo_core.errors import RunInterruptedError
from ppo_core.models.files.critic_files import load_critic
from ppo_core.models.files.rollout_files import KeptRollout, read_rollouts
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.logprobs_and_values import critic_values
from ppo_core.ppo.rewards import RewardMix, score_tokens
from ppo_core.training.critic_fit import NUM_EPOCHS, NUM_KEPT, CriticFit
from ppo_core.training.model_setup import join_processes, set_up_models
from ppo_core.training.trainer import Trainer
from tests.helpers.models.tiny import VOCABULARY, make_classifier, make_policy, make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.runs.forked_python import run_python
from tests.ppo_core.training.test_trainer import CONFIG, PROMPTS

ROWS = [{"prompt": prompt, "reference": "w1"} for prompt in PROMPTS]

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
    reward: object = None,
    prompts: Sequence[object] = PROMPTS,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: object,
) -> Trainer:
    """Return a trainer that starts from the critic and the rollouts in a folder."""
    tokenizer, policy = tokenizer or make_tokenizer(), make_policy()
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
    rollouts = () if critic is None else read_rollouts(critic, VOCABULARY)
    prompts = make_run_prompts(prompts, None, tokenizer, policy, config)
    return Trainer(config, models, prompts, engine=engine, earlier_rollouts=rollouts, **options)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a critic that an earlier run has trained with another reward."""
    folder = tmp_path_factory.mktemp("earlier") / "critic"
    reward = RewardModel(make_classifier(), make_tokenizer())
    trainer = make_trainer(keeps_rollouts=True, reward=reward)
    trainer.train()
    trainer.save_critic(folder)
    return folder


def test_a_run_keeps_its_first_rollouts_and_no_later_ones(earlier: Path, monkeypatch):
    kept = read_rollouts(earlier, VOCABULARY)
    assert [len(each.rollout) for each in kept] == [8] * NUM_KEPT
    trainer = make_trainer(reward=RewardModel(make_classifier(), make_tokenizer()))
    seen, finish = [], trainer._finish_update

    def noted(pending, sums):
        seen.append(pending.experience.rollout)
        return finish(pending, sums)

    monkeypatch.setattr(trainer, "_finish_update", noted)
    trainer.train()
    for each, own in zip(kept, seen[:NUM_KEPT], strict=True):
        for name, value in vars(each.rollout).items():
            if name not in ("logprobs", "behavior_logprobs"):
                assert_close(value, getattr(own, name))
        for ids, length, prompt in zip(
            own.prompt_ids, own.prompt_lengths, each.prompts, strict=True
        ):
            assert ids[:length].tolist() == prompt


def fit_of(trainer: Trainer) -> CriticFit:
    return CriticFit(
        config=trainer.config,
        engine=trainer.engine,
        rewards=trainer.rewards,
        train_state=trainer._train_state,
    )


def shaped(trainer: Trainer, rollout: Rollout) -> torch.Tensor:
    """Return the scores of the first reward, less 1 (missing_eos_penalty) without a stop token."""
    scores = score_tokens(trainer.rewards.models()[0], rollout, 8)
    return scores - (~rollout.has_stop).float()


def test_the_targets_are_the_shaped_scores_discounted_from_the_last_token(earlier: Path):
    trainer = make_trainer(replace(SETTINGS, gamma=0.9), critic=earlier)
    (kept, *_) = read_rollouts(earlier, VOCABULARY)
    experience = fit_of(trainer)._experience(kept, trainer.rewards, RunningMoments(), {})
    scores = shaped(trainer, kept.rollout)
    for b, length in enumerate(kept.rollout.response_lengths.tolist()):
        expected = [float(scores[b]) * 0.9 ** (length - 1 - t) for t in range(length)]
        assert_close(experience.returns[b, :length], torch.tensor(expected))
        assert not experience.returns[b, length:].any()


def squared_error(trainer: Trainer, rollouts: Sequence[KeptRollout]) -> float:
    """Return the critic's mean squared error against the shaped scores."""
    errors = []
    for each in rollouts:
        values = critic_values(trainer.critic, each.rollout, 8)
        wrong = values - shaped(trainer, each.rollout)[:, None]
        errors.append(wrong[each.rollout.response_mask] ** 2)
    return float(torch.cat(errors).mean())


@pytest.mark.parametrize(
    "changes",
    [
        {"warmup_ratio": 0.5},
        {"target_kl": 0.001},
        {"ratio_threshold": 1.001},
        {"kl_in_loss": True, "kl_estimator": "k3"},
        {"kl_estimator": "full"},
        {"num_mini_batches": 4, "num_ppo_epochs": 3},
        {"whiten_rewards": True},
        {"ema_decay": 0.9},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_the_fit_trains_the_critic_alone_and_leaves_the_rest_as_it_was(earlier: Path, changes):
    trainer = make_trainer(replace(SETTINGS, **changes), critic=earlier)
    rollouts = read_rollouts(earlier, VOCABULARY)
    state, policy = trainer._train_state, make_policy().state_dict()
    before, schedule = squared_error(trainer, rollouts), state.scheduler.state_dict()
    rates = [group["lr"] for group in state.optimizer.param_groups]
    # A warm-up of the learning rate begins at 0, and the fit must not.
    assert (rates[0] == 0.0) == ("warmup_ratio" in changes)
    trainer._fit_critic()
    # Whitened rewards are another target.
    assert squared_error(trainer, rollouts) < (0.9 if "whiten_rewards" in changes else 0.5) * before
    assert_close(trainer.policy.model.state_dict(), policy, rtol=0, atol=0)
    assert state.scheduler.state_dict() == schedule
    assert [group["lr"] for group in state.optimizer.param_groups] == rates
    assert not any(state.optimizer.state.values())
    assert (state.skipped_steps, state.skipped_in_a_row) == (0, 0)
    assert trainer._run.critic_fit_is_over


@pytest.mark.parametrize("setting", ["use_score_scaling", "scale_each_reward"])
def test_scaled_scores_are_the_targets_and_the_moments_of_the_run_stay_empty(
    earlier: Path, setting: str
):
    trainer = make_trainer(replace(SETTINGS, **{setting: True}), critic=earlier)
    (kept, *_) = read_rollouts(earlier, VOCABULARY)
    experience = fit_of(trainer)._experience(kept, trainer.rewards, RunningMoments(), {})
    scores = score_tokens(trainer.rewards.models()[0], kept.rollout, 8)
    expected = scores / scores.std() - (~kept.rollout.has_stop).float()
    last = kept.rollout.response_lengths - 1
    assert_close(experience.returns.gather(1, last[:, None])[:, 0], expected)
    trainer._fit_critic()
    assert trainer._run.moments.state_dict() == RunningMoments().state_dict()
    assert not trainer._run.reward_moments


def test_a_chat_is_scored_as_the_run_scores_it(tmp_path: Path, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }} w5 {% endfor %}"
        "{% if add_generation_prompt %}w6 {% endif %}"
    )
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]

    def reward() -> RewardModel:
        return RewardModel(make_classifier(), tokenizer, end_of_text=False)

    options = {"prompts": chats, "tokenizer": tokenizer}
    first = make_trainer(reward=reward(), keeps_rollouts=True, **options)
    scored, score = [], first._score

    def noted(rollout, prompts):
        found = score(rollout, prompts)
        scored.append(found.scores)
        return found

    monkeypatch.setattr(first, "_score", noted)
    first.train()
    first.save_critic(tmp_path / "critic")
    second = make_trainer(critic=tmp_path / "critic", reward=reward(), **options)
    kept = read_rollouts(tmp_path / "critic", VOCABULARY)
    assert kept[0].prompts[0] in chats
    for each, expected in zip(kept, scored[:NUM_KEPT], strict=True):
        found, _ = second.rewards(each.prompts, each.rollout)
        assert_close(found, expected)


def test_a_rollout_with_a_score_that_is_not_finite_is_left_out(earlier: Path, monkeypatch):
    trainer, calls, total = make_trainer(critic=earlier), [], RewardMix.total

    def broken_once(self: RewardMix, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(parts)
        return total(self, parts) * (float("nan") if len(calls) == 1 else 1.0)

    monkeypatch.setattr(RewardMix, "total", broken_once)
    trainer._fit_critic()
    assert len(calls) == NUM_KEPT
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.critic.parameters())
    assert trainer._train_state.skipped_steps == 0


def length(prompts: list[str], responses: list[str], reference: list[str]) -> list[float]:
    """A reward that needs a column, which kept rollouts do not have."""
    raise AssertionError("It was called for kept rollouts.")


def test_a_function_as_reward_fits_nothing_and_the_run_says_so(earlier: Path, capsys):
    trainer = make_trainer(critic=earlier, reward=length, prompts=ROWS)
    trainer._fit_critic()
    assert "The critic was not fitted" in capsys.readouterr().err
    fresh = load_critic(earlier)
    assert_close(trainer.critic.state_dict(), fresh.state_dict(), rtol=0, atol=0)


def test_a_reward_that_is_only_logged_is_left_out(earlier: Path, capsys):
    rewards = {"model": RewardModel(make_classifier(seed=1), make_tokenizer()), "logged": length}
    settings = replace(SETTINGS, reward_weights=[1.0, 0.0])
    trainer = make_trainer(settings, critic=earlier, reward=rewards, prompts=ROWS)
    trainer._fit_critic()
    assert "The critic was fitted to 40 responses" in capsys.readouterr().err


def test_a_checkpoint_without_kept_rollouts_adds_no_later_ones(tmp_path: Path):
    settings = replace(SETTINGS, save_strategy="steps", output_dir=str(tmp_path))
    make_trainer(settings).train(stop_after_updates=3)
    resumed = make_trainer(settings, keeps_rollouts=True)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed._run.first_rollouts) == NUM_KEPT - 3


def test_sigterm_stops_the_fit_and_the_next_attempt_gives_the_same(earlier: Path, tmp_path: Path):
    settings = replace(SETTINGS, save_strategy="steps", output_dir=str(tmp_path / "cut"))
    trainer = make_trainer(settings, critic=earlier)
    steps, count = [], trainer._train_state.count_step

    def interrupted(**how: bool) -> None:
        count(**how)
        steps.append(how)
        if len(steps) == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._train_state.count_step = interrupted
    with pytest.raises(RunInterruptedError):
        trainer.train()
    assert len(steps) == 7
    assert not [*tmp_path.glob("cut/checkpoint-*")]
    again = make_trainer(settings, critic=earlier)
    again.train(resume_from_checkpoint=True)
    whole = make_trainer(replace(settings, output_dir=str(tmp_path / "whole")), critic=earlier)
    whole.train()
    assert_close(again.critic.state_dict(), whole.critic.state_dict(), rtol=0, atol=0)


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


def test_the_page_names_the_numbers_of_rollouts_and_epochs():
    page = " ".join((ROOT / "docs" / "retraining.md").read_text().split())
    assert (NUM_KEPT, NUM_EPOCHS) == (5, 4)
    assert "its first five rollouts" in page
    assert "The critic is trained four times on the kept answers" in page
