"""Policy and critic learning at the same time, where both are small."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from ppo_core.models.policy import LanguageModel
from ppo_core.ppo import passes
from ppo_core.ppo.passes import run_both, two_threads
from tests.helpers.models.tiny import make_policy
from tests.ppo_core.ppo.test_update import (
    make_config,
    make_experience,
    make_shared_train_state,
    make_train_state,
    weights_after,
)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_functions_meet_with_half_of_the_threads_each():
    meeting = threading.Barrier(2, timeout=10)

    def threads() -> int:
        meeting.wait()
        return torch.get_num_threads()

    with two_threads(enabled=True) as second_thread:
        assert run_both(second_thread, threads, threads) == (1, 1)
        names = run_both(second_thread, lambda: "first", lambda: "second")
    assert names == ("first", "second")
    assert torch.get_num_threads() == 2
    with two_threads(enabled=False) as second_thread:
        assert second_thread is None
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_of_either_is_raised_and_the_threads_come_back(which):
    def fail() -> None:
        raise ValueError("broken")

    functions = [lambda: None, lambda: None]
    functions[which] = fail
    with pytest.raises(ValueError, match="broken"), two_threads(enabled=True) as second_thread:
        run_both(second_thread, *functions)
    assert torch.get_num_threads() == 2


def threads_of_an_update(train_state, **changes: object) -> set[int]:
    """The threads in which policy and critic make their forward passes."""
    seen = set()
    for part in (train_state.module.policy, train_state.module.critic):
        norm = part.backbone.module.norm
        norm.register_forward_hook(lambda *_: seen.add(threading.get_ident()))
    weights_after(make_config(**changes), make_experience(), train_state)
    return seen


@pytest.mark.slow
def test_small_models_learn_at_the_same_time_and_large_ones_do_not(monkeypatch):
    assert len(threads_of_an_update(make_train_state())) == 2
    assert len(threads_of_an_update(make_train_state(), gradient_checkpointing=True)) == 1
    assert len(threads_of_an_update(make_shared_train_state())) == 1
    train_state = make_train_state()
    embeddings = [part.backbone.module.embed_tokens for part in train_state.module.children()]
    embeddings[1].weight = embeddings[0].weight
    assert len(threads_of_an_update(train_state)) == 1
    torch.set_num_threads(1)
    assert len(threads_of_an_update(make_train_state())) == 1
    torch.set_num_threads(2)
    train_state = make_train_state()
    most = max(weight.numel() for weight in train_state.module.parameters())
    monkeypatch.setattr(passes, "MIN_NUMEL", most + 1)
    assert len(threads_of_an_update(train_state)) == 2
    train_state = make_train_state()
    train_state.reference = LanguageModel(make_policy())
    train_state.reference.register_parameter("large", torch.nn.Parameter(torch.ones(most + 1)))
    assert len(threads_of_an_update(train_state)) == 1
    monkeypatch.setattr(passes, "MIN_NUMEL", most)
    assert len(threads_of_an_update(make_train_state())) == 1


@pytest.mark.slow
def test_both_ways_end_at_the_same_weights(monkeypatch):
    config = make_config(num_ppo_epochs=2, num_mini_batches=2, per_device_train_batch_size=2)
    at_once, _ = weights_after(config, make_experience())
    monkeypatch.setattr(passes, "MIN_NUMEL", 1)
    in_turn, _ = weights_after(config, make_experience())
    assert_close(at_once, in_turn, rtol=0, atol=1e-6)
