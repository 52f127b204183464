"""Settings of a script from flags and a YAML file, as TRL's parser reads them."""

import os
from pathlib import Path

import pytest

from ppo_core import ConfigError, ModelConfig, PPOConfig, ScriptArguments, TrlParser

RECIPE = """
# 1e-5 is a text in YAML, and the fp16 that TRL writes is what happens anyway.
learning_rate: 1e-5
total_episodes: 64
fp16: false
ds3_gather_for_generation: false
report_to: [none]
dataset_name: prompts.jsonl
model_name_or_path: gpt2
env:
  OF_RECIPE: 5
"""


def parse(folder: Path, recipe: str, *words: str, **options):
    (folder / "recipe.yaml").write_text(recipe)
    parser = TrlParser((ScriptArguments, PPOConfig, ModelConfig))
    return parser.parse_args_and_config(
        ["--config", str(folder / "recipe.yaml"), *words], **options
    )


def test_flags_override_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_RECIPE", "")
    data, config, model = parse(
        tmp_path, RECIPE, *"--total_episodes 8 --reward_weights 1 -1e-5".split()
    )
    assert (config.learning_rate, config.total_episodes) == (1e-5, 8)
    assert config.reward_weights == [1, -1e-5]
    # Its default is True, so the flag --no_ds3_gather_for_generation sets it as well.
    assert config.ds3_gather_for_generation is False
    assert (data.dataset_name, model.model_name_or_path) == ("prompts.jsonl", "gpt2")
    assert os.environ["OF_RECIPE"] == "5"


def test_the_file_may_follow_an_equals_sign(tmp_path):
    (tmp_path / "recipe=1.yaml").write_text("seed: 5\ntotal_episodes: 8")
    words = ["--total_episodes", "16", f"--config={tmp_path / 'recipe=1.yaml'}"]
    (config,) = TrlParser(PPOConfig).parse_args_and_config(words)
    assert (config.seed, config.total_episodes) == (5, 16)


def test_a_script_without_a_file_has_flags_alone(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py", "--seed", "4"])
    (config,) = TrlParser(PPOConfig).parse_args_and_config()
    assert config.seed == 4


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("fp16: true", "fp16=True is not supported"),
        ("learnig_rate: 1", "no setting learnig_rate.*mean learning_rate"),
        ("- 1", "has no table of settings"),
        ("{", "is not YAML"),
        ("env: FOO=1", "env is a str, not a mapping"),
        ("env: [FOO=1]", "env is a list, not a mapping"),
        ("env: false", "env is a bool, not a mapping"),
        ("total_episodes: -1", "total_episodes=-1 must be"),
    ],
)
def test_a_file_with_other_content_is_refused(tmp_path, recipe: str, words: str):
    with pytest.raises(ConfigError, match=words):
        parse(tmp_path, recipe)


def test_a_missing_file_is_refused():
    for words in (["--config"], ["--config", "gone.yaml"]):
        with pytest.raises(ConfigError, match=r"cannot be read|does not exist|is a folder"):
            TrlParser(PPOConfig).parse_args_and_config(words)


def test_a_script_may_ask_for_what_is_left(tmp_path):
    *_, left = parse(tmp_path, "unknown: 1", "--other", "2", return_remaining_strings=True)
    assert left == ["unknown", "--other", "2"]
