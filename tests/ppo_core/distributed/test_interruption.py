"""SIGTERM at any moment of an update: what was done is kept, and the run goes on to the bit."""

import dataclasses
import hashlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ppo_core.checkpointing.read_checkpoint import read_newest
from ppo_core.distributed.interruption import Interruption
from ppo_core.errors import RunInterruptedError
from ppo_core.models.policy import LanguageModel
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.slow_cases import slow
from tests.ppo_core.training.test_trainer import CLOCKS, CONFIG, make_trainer

# Everything that a run carries on: moments, an adapted coefficient, several steps an update.
SETTINGS = dataclasses.replace(
    CONFIG,
    total_episodes=48,
    kl_target=1.0,
    use_score_scaling=True,
    save_strategy="steps",
    save_steps=100,
)
UPDATES = 3


def trainer_in(folder: Path, **changes) -> PPOTrainer:
    torch.manual_seed(3)
    config = dataclasses.replace(SETTINGS, output_dir=str(folder))
    calls: dict[str, int] = {}
    trainer = make_trainer(config, reward_model=make_noisy_reward(calls), **changes)
    trainer.reward_calls = calls
    return trainer


def make_noisy_reward(calls: dict[str, int]) -> Callable[[list[str], list[str]], list[float]]:
    """A reward that draws from torch's own generator, as a served model may.

    SIGTERM comes in call `calls["stop"]`.
    """

    def noisy_reward(prompts: list[str], responses: list[str]) -> list[float]:
        calls["made"] = calls.get("made", 0) + 1
        if calls["made"] == calls.get("stop"):
            os.kill(os.getpid(), signal.SIGTERM)
        lengths = torch.tensor([len(response) / 10 for response in responses])
        return (torch.rand(len(responses)) + lengths).tolist()

    return noisy_reward


def everything(trainer: PPOTrainer) -> str:
    """A digest of all weights and of the optimizer's state."""
    digest = hashlib.sha256()
    module, optimizer = trainer._train_state.module, trainer._train_state.optimizer
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
        for _, value in sorted(optimizer.state[parameter].items()):
            digest.update(torch.as_tensor(value).numpy().tobytes())
    return digest.hexdigest()


def without_clocks(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in metrics.items() if k not in CLOCKS} for metrics in history]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[str, list[dict[str, float]]]:
    trainer = trainer_in(tmp_path_factory.mktemp("whole"))
    history = trainer.train()
    return everything(trainer), without_clocks(history)


def terminate_at(module: nn.Module, call: int, *, learning: bool = False) -> None:
    """SIGTERM to this process when a module is called for the `call`-th time.

    With `learning` the passes of an update count alone. It must be a module that has no others: a
    pass of our own would not call it.
    """
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += torch.is_grad_enabled() or not learning
        if calls == call:
            os.kill(os.getpid(), signal.SIGTERM)

    module.register_forward_pre_hook(count)


def embeddings(model: LanguageModel) -> nn.Module:
    return model.model.get_input_embeddings()


MOMENTS = {
    "between two steps of an update": lambda t: terminate_at(t.critic.head, 15, learning=True),
    "the first sampling": lambda t: terminate_at(embeddings(t.policy), 2),
    "scoring": lambda t: t.reward_calls.update(stop=2),
    "the first step of an update": lambda t: terminate_at(t.critic.head, 1, learning=True),
    "the last step of the second update": lambda t: terminate_at(t.critic.head, 23, learning=True),
}


FIRST, *LATER = MOMENTS


@pytest.mark.parametrize("moment", [FIRST, *slow(*LATER)])
def test_a_run_that_was_told_to_stop_goes_on_as_if_nothing_had_happened(
    moment, uninterrupted, tmp_path
):
    stopped = trainer_in(tmp_path)
    MOMENTS[moment](stopped)
    with pytest.raises(RunInterruptedError, match="Training stopped after SIGTERM in update"):
        stopped.train()
    done = without_clocks(stopped.state.log_history)
    resumed = trainer_in(tmp_path)
    torch.manual_seed(99)
    history = resumed.train(resume_from_checkpoint=True)
    assert everything(resumed) == uninterrupted[0]
    assert 1 <= len(history) == UPDATES - len(done)
    assert without_clocks(history) == uninterrupted[1][-len(history) :]


def test_a_stop_in_the_first_update_does_not_show_the_first_samples_again(tmp_path):
    texts = ["w1 w2 w3", "w4 w5"]
    whole = trainer_in(tmp_path / "whole", eval_dataset=texts)
    whole.train()
    stopped = trainer_in(tmp_path / "stopped", eval_dataset=texts)
    MOMENTS["the first step of an update"](stopped)
    with pytest.raises(RunInterruptedError):
        stopped.train()
    assert read_newest(tmp_path / "stopped").folder.name == "checkpoint-0"
    resumed = trainer_in(tmp_path / "stopped", eval_dataset=texts)
    resumed.train(resume_from_checkpoint=True)
    # The reward draws random numbers, also for the samples.
    assert everything(resumed) == everything(whole)
    calls = [each.reward_calls["made"] for each in (whole, stopped, resumed)]
    assert calls[0] == calls[1] + calls[2]


def test_the_moments_are_what_they_are_called():
    trainer = make_trainer(SETTINGS)
    passes = []
    trainer.critic.head.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    trainer.step()
    # Two epochs of two minibatches of 8 responses, 3 at a time.
    assert passes.count(True) == 12


@pytest.mark.parametrize(
    ("moment", "updates", "steps"),
    [
        ("scoring", 1, 0),
        ("the first step of an update", 0, 1),
        ("between two steps of an update", 1, 1),
        ("the last step of the second update", 2, 0),
    ],
)
def test_an_optimizer_step_that_was_begun_is_taken_before_the_run_stops(
    moment, updates, steps, tmp_path
):
    trainer, taken = trainer_in(tmp_path), []
    trainer._train_state.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    MOMENTS[moment](trainer)
    with pytest.raises(RunInterruptedError):
        trainer.train()
    assert trainer._run.updates == updates
    pending = trainer._run.pending
    assert (pending.progress.steps_done if pending else 0) == steps
    assert len(taken) == 4 * updates + steps


def test_sigterm_in_the_last_step_of_all_lets_the_run_end(tmp_path, uninterrupted):
    trainer = trainer_in(tmp_path)
    terminate_at(trainer.critic.head, 35, learning=True)
    assert without_clocks(trainer.train()) == uninterrupted[1]
    assert everything(trainer) == uninterrupted[0]


class TerminateAfterAnUpdate(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("moment", ["in a batch of the sampling", "between two updates"])
def test_nothing_is_sampled_that_would_be_thrown_away(moment, tmp_path):
    trainer = trainer_in(tmp_path)
    backbone = trainer.policy.backbone.module
    if moment == "between two updates":
        trainer.add_callback(TerminateAfterAnUpdate())
    else:
        terminate_at(backbone, 1)
    passes: list[int] = []
    backbone.register_forward_hook(lambda *_: passes.append(trainer._run.updates))
    with pytest.raises(RunInterruptedError):
        trainer.train()
    # 16 responses of up to 8 tokens are sampled 5 at a time.
    most = {"in a batch of the sampling": SETTINGS.response_length, "between two updates": 0}
    assert passes.count(trainer._run.updates) <= most[moment]


def test_a_run_that_was_stopped_goes_on_in_the_same_process(tmp_path, uninterrupted):
    trainer = trainer_in(tmp_path)
    terminate_at(trainer.critic.head, 15, learning=True)
    with pytest.raises(RunInterruptedError):
        trainer.train()
    trainer.train()
    assert everything(trainer) == uninterrupted[0]


def test_without_checkpoints_the_run_just_stops(tmp_path):
    trainer = make_trainer(dataclasses.replace(CONFIG, output_dir=str(tmp_path)))
    terminate_at(trainer.critic.head, 1, learning=True)
    with pytest.raises(
        RunInterruptedError, match="No checkpoint was saved, because save_strategy='no'"
    ):
        trainer.train()
    assert read_newest(tmp_path) is None


def test_sigterm_is_what_it_was_before_and_after():
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        interruption = Interruption()
        with interruption:
            os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.requested and not seen
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_training_in_another_thread_leaves_sigterm_as_it_is():
    handlers: list[object] = []

    def train() -> None:
        with Interruption():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert handlers == [before] == [signal.getsignal(signal.SIGTERM)]


def test_an_experience_is_kept_to_the_bit(tmp_path):
    trainer = make_trainer(dataclasses.replace(SETTINGS, output_dir=str(tmp_path)))
    prompts = trainer._draw_prompts()
    rollout = trainer._sample(prompts)
    pending = trainer._make_experience(rollout, trainer._score(rollout, prompts), prompts)
    tensors, state = pending.as_checkpoint()
    again = type(pending).from_checkpoint(tensors, state)
    assert again.metrics == pending.metrics
    assert again.progress.sums == pending.progress.sums
    for record, other in (
        (pending.experience, again.experience),
        (pending.experience.rollout, again.experience.rollout),
    ):
        for name, value in vars(record).items():
            if isinstance(value, Tensor):
                assert torch.equal(value, getattr(other, name)), name
    assert again.experience.rollout.temperature == pending.experience.rollout.temperature
