"""Names that are not settings or options: what to write instead."""

import subprocess
import sys
from pathlib import Path

import pytest

from metaflow_glue.command_line import check_settings_file
from pipeline.settings.make_settings import SETTING_NAMES, make_settings
from pipeline.settings.unknown_names import describe_unknown_option
from ppo_core.errors import ConfigError
from tests.helpers.paths import ROOT

THREE = "sft.learning_rate or reward_model_training.learning_rate or ppo.learning_rate"


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        ({"learning_rate": 1e-5}, f"Did you mean {THREE}?"),
        ({"lr": 1e-5}, f"Did you mean {THREE}?"),
        ({"ppo": {"lr": 1e-5}}, "Did you mean ppo.learning_rate?"),
        ({"sft": {"num_train_epochs": 2}}, "Did you mean sft.num_epochs?"),
        ({"sft": {"packing": True}}, "Unknown setting sft.packing. Instead: each row is a"),
        ({"ppo": {"fp16": True}}, "Unknown setting ppo.fp16. Instead: set bf16=True"),
        ({"ppo": {"num_examples": 5}}, "Did you mean evaluation.num_examples?"),
        ({"model_name_or_path": "m"}, "Did you mean policy"),
        ({"kl-coef": 0.1}, "Did you mean ppo.kl_coef?"),
        ({"promt": "x"}, "Did you mean prompts?"),
        ({"lora": {"lora_r": 8}}, "Did you mean lora.r?"),
    ],
)
def test_an_unknown_setting_names_the_one_that_was_meant(table: dict, hint: str):
    with pytest.raises(ConfigError) as refused:
        make_settings(table, {})
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--learning-rate", "--set sft.learning_rate=VALUE or --set reward_model_training."),
        ("--kl-coef", "Did you mean --set ppo.kl_coef=VALUE?"),
        ("--kl_coeff", "Did you mean --set ppo.kl_coef=VALUE?"),
        ("--sft-data", "Did you mean --set sft_data=VALUE?"),
        ("--model", "Did you mean --policy?"),
        ("--eval_prompts", "Write --eval-prompts after `run`"),
        ("--evalprompts", "Did you mean --eval-prompts?"),
        ("--config", "python flows/rlhf.py --config settings FILE run"),
        ("--qqq", "--set SECTION.NAME=VALUE"),
    ],
)
def test_an_unknown_option_names_the_one_that_was_meant(option: str, hint: str):
    assert hint in describe_unknown_option(option, ["policy", "eval-prompts"], SETTING_NAMES)


def test_a_settings_file_behind_run_is_refused_with_the_right_form():
    with pytest.raises(ConfigError, match=r"'my.toml' after `run` .*--config settings FILE run"):
        check_settings_file(["flows/rlhf.py", "run", "my.toml"])


@pytest.mark.parametrize(
    "words", ["--config x.toml run", "--config settings=x.toml run", "--config settings run"]
)
def test_another_form_of_the_settings_file_is_refused_with_the_right_one(words: str):
    with pytest.raises(ConfigError, match=r"Write: python flows/rlhf\.py --config settings FILE"):
        check_settings_file(["flows/rlhf.py", *words.split()])


def test_resume_without_a_run_says_where_to_start_it(tmp_path: Path):
    ran = rlhf(tmp_path, "resume")
    assert ran.returncode == 1
    assert f"{str(tmp_path)!r} has no run to resume" in ran.stderr


def rlhf(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "flows" / "rlhf.py"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_metaflow_s_message_about_an_option_has_the_hint(tmp_path: Path):
    ran = rlhf(tmp_path, "run", "--kl-coef", "0.1")
    assert ran.returncode == 2
    assert "no such option: --kl-coef. Did you mean --set ppo.kl_coef=VALUE?" in ran.stderr
