"""Entries of `rewards`: name, kind and source, and what is refused."""

import pytest

from ppo_core.config.reward_names import OWN, read_rewards
from ppo_core.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "name", "kind", "source"),
    [
        ("reward-model", "reward-model", "reward-model", ""),
        ("mine=reward-model", "mine", "reward-model", ""),
        ("reward-model:models/harmless/", "harmless", "reward-model", "models/harmless/"),
        ("reward-model:org/harmless@v1", "harmless", "reward-model", "org/harmless@v1"),
        (
            "reward-model:s3://bucket/inputs/harmless#sha256=0a",
            "harmless",
            "reward-model",
            "s3://bucket/inputs/harmless#sha256=0a",
        ),
        ("python:rewards.py:brevity", "brevity", "python", "rewards.py:brevity"),
        ("python:own.rewards:brevity", "brevity", "python", "own.rewards:brevity"),
        ("short = python:a.py:f".replace(" ", ""), "short", "python", "a.py:f"),
        ("openai:gpt-4.1", "gpt-4.1", "openai", "gpt-4.1"),
        ("kind=transformers:org/chat@v1", "kind", "transformers", "org/chat@v1"),
        # A path may hold an equals sign.
        ("python:a=b.py:f", "f", "python", "a=b.py:f"),
    ],
)
def test_an_entry_has_a_name_a_kind_and_a_source(spec, name, kind, source):
    (found,) = read_rewards([f" {spec} "])
    assert (found.name, found.kind, found.source, found.is_own) == (name, kind, source, not source)
    assert found.moved(source) == spec
    (moved,) = read_rewards([found.moved("elsewhere/0a1b:g")])
    assert moved.name == name


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("reward_model", r"rewards: 'reward_model' is unknown\. Did you mean reward-model\?"),
        ("reward-modle:x", r"Did you mean reward-model:x\?"),
        ("pyhton:a.py:f", r"Did you mean python:a\.py:f\?"),
        ("Python:a.py:f", r"Did you mean python:a\.py:f\?"),
        ("python:", "'python:' is unknown"),
        ("python", "'python' is unknown"),
        ("openai:", "'openai:' is unknown"),
        ("transformer:x", r"Did you mean transformers:x\?"),
        ("", "'' is unknown"),
        ("a.py:f", "'a.py:f' is unknown"),
    ],
)
def test_an_unknown_entry_is_named_with_the_nearest(spec, says):
    with pytest.raises(ConfigError, match=says) as refused:
        read_rewards([OWN, spec])
    assert "reward-model:PATH, python:FILE_OR_MODULE:FUNCTION, openai:MODEL" in str(refused.value)


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (["reward-model", "again=reward-model"], r"'again=reward-model' twice"),
        (["python:a.py:f", "x=python:./a.py:f"], r"'x=python:\./a\.py:f' twice"),
        (["reward-model:a/b", "x=reward-model:a/c/../b"], "twice"),
        (["python:a.py:f", "python:b.py:f"], r"the name 'f'.*Write NAME= before one"),
        (["f=reward-model", "python:b.py:f"], "the name 'f'"),
    ],
)
def test_a_reward_counts_once_and_has_a_name_of_its_own(specs, says):
    with pytest.raises(ConfigError, match=says):
        read_rewards(specs)
