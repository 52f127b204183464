"""The names in a checkpoint: a renamed field or key would make older checkpoints unreadable."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ppo_core.checkpointing.fingerprint import Fingerprint
from ppo_core.checkpointing.read_checkpoint import read_newest
from ppo_core.errors import RunInterruptedError
from tests.ppo_core.distributed.test_interruption import MOMENTS, trainer_in

BY_NAME = ("identity", "optimizer", "kept", "scheduler", "reporter", "groups")
"""Entries of trainer_state.json whose keys are parameters, settings, or another library's."""

STATE_KEYS = """
step processes identity optimizer kept scheduler skipped_steps skipped_in_a_row pretraining groups
run.updates run.episodes run.moments.count run.moments.mean run.moments.squares run.reward_moments
run.critic_fit_is_over
run.adaptive_kl.kl_coef run.adaptive_kl.mean run.health.warned run.health.skipped
run.health.drop.recent run.health.drop.best run.health.drop.changes run.health.drop.updates
run.pending.steps_done
run.pending.values.kl_loss_coef run.pending.values.rollout.temperature
run.pending.values.rollout.behavior_logprobs
run.pending.sums.tokens run.pending.sums.policy_loss run.pending.sums.value_loss
run.pending.sums.new_values
run.pending.sums.entropy run.pending.sums.approxkl run.pending.sums.kl_from_old
run.pending.sums.kl_loss run.pending.sums.clipped run.pending.sums.value_clipped
run.pending.sums.ratio_error run.pending.sums.abs_ratio_error run.pending.sums.ratio_error_squared
run.pending.sums.first_tokens run.pending.sums.first_ratio_error reporter
""".split()
"""Paths of the keys in trainer_state.json, without metrics and warnings."""

EXPERIENCE = set(
    """
advantages order ref_logprobs returns rollout.has_stop rollout.logprobs rollout.prompt_ids
rollout.prompt_lengths rollout.response_ids rollout.response_lengths rollout.response_mask values
""".split()
)


def paths_of_keys(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and path not in BY_NAME:
        for key, inner in value.items():
            yield from paths_of_keys(inner, f"{path}.{key}".lstrip("."))
    else:
        yield path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint between two optimizer steps of an update."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_in(folder)
    MOMENTS["between two steps of an update"](trainer)
    with pytest.raises(RunInterruptedError):
        trainer.train()
    return read_newest(folder).folder


def test_the_names_in_the_state(checkpoint):
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    keys = set(paths_of_keys(state))
    free = ("run.pending.metrics.", "run.health.in_a_row.", "run.health.first.")
    assert {key for key in keys if not key.startswith(free)} == set(STATE_KEYS)
    assert set(state["identity"]) == {"settings", "models"}
    assert {"num_updates", "steps_per_update", "prompts"} <= set(state["identity"]["settings"])
    assert set(state["identity"]["models"]) == {"reference", "policy or critic"}
    assert set(state["optimizer"]) == {"kind", "groups"}


def test_the_names_of_tensors(checkpoint):
    names = {path.stem: set(load_file(path)) for path in checkpoint.glob("*.safetensors")}
    assert names["generators"] == {"sampling", "shuffling"}
    assert names["process-0"] == {"torch", "numpy"}
    assert names["experience"] == EXPERIENCE
    assert {"critic.model.embed_tokens.weight", "critic.head.weight"} <= names["critic"]
    assert {"policy.model.lm_head.weight/exp_avg", "critic.head.bias/step"} <= names["optimizer-0"]
    assert names.keys() == {
        "model",
        "critic",
        "optimizer-0",
        "process-0",
        "generators",
        "experience",
    }


@pytest.mark.parametrize(("target", "phrases"), [(None, 0), (6.0, 1)])
def test_a_horizon_counts_only_with_a_target_so_that_its_default_may_change(
    target: float | None, phrases: int
):
    """Version 0.1 wrote a kl_horizon of 10,000, and the microbatches, into every checkpoint."""
    now = Fingerprint(settings={"kl_target": target, "kl_horizon": None, "seed": 1}, models={})
    saved = {"settings": {"kl_target": target, "kl_horizon": 10_000, "seed": 1}, "models": {}}
    saved["settings"] |= {"per_device_train_batch_size": 4, "gradient_checkpointing": False}
    assert len(now.differences(saved)) == phrases


def test_a_launcher_in_bf16_resumes_a_checkpoint_that_recorded_false(monkeypatch):
    now = Fingerprint(settings={"bf16": True}, models={})
    saved = {"settings": {"bf16": False}, "models": {}}
    assert len(now.differences(saved)) == 1
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert not now.differences(saved)
