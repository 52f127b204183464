"""`--set section.name=value`: values, mistakes, and what it overrides."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from metaflow_glue.metaflow_secrets import keep_secrets_from_metaflow
from pipeline.settings.make_settings import make_settings
from pipeline.settings.overrides import read_overrides
from pipeline.settings.settings import Settings
from ppo_core.errors import ConfigError

OWN = {"policy": "p", "preferences": "a", "prompts": "b", "eval_prompts": "c", "judge": "rule"}


def settings(*overrides: str, file: dict[str, Any] | None = None, **options: Any) -> Settings:
    return make_settings({**OWN, **(file or {})}, options, overrides)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-6", 3e-6),
        ("7", 7),
        ("true", True),
        ("False", False),
        ("train.jsonl", "train.jsonl"),
        ("python:judge.py:judge", "python:judge.py:judge"),
        ('"7"', "7"),
        ('["q_proj", "v_proj"]', ["q_proj", "v_proj"]),
        ("{ r = 4 }", {"r": 4}),
        ("a=b", "a=b"),
        ("", ""),
        # A comment and a second setting are not part of a value.
        ("5 # five", "5 # five"),
        ("5, other = 6", "5, other = 6"),
        ("5\nother = 6", "5\nother = 6"),
        ("2026-11-23", "2026-11-23"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_a_value_is_toml_or_a_text_without_quotes(text: str, value: object):
    assert read_overrides([f"a.b={text}"]) == {"a": {"b": value}}


def test_a_name_with_a_point_is_quoted():
    price = 'hardware.judge_prices."openai:gpt-4.1"=0.002'
    changed = settings(price, judge="openai:gpt-4.1")
    assert changed.hardware.judge_prices == {"openai:gpt-4.1": 0.002}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ppo.learning_rate"], "has no name or no '='"),
        (["=3"], "has no name or no '='"),
        (["ppo.=3"], "has no name or no '='"),
        (["lora.target_modules=['q'"], r"--set lora.target_modules=\"\['q'\" is not a TOML value"),
        (['judge="rule'], "is not a TOML value"),
        (["a=" + "[" * 5000], "is not a TOML value"),
        (["ppo.seed=1", "ppo.seed=2"], "--set gives ppo.seed twice"),
        (["ppo=1", "ppo.seed=2"], "gives both a setting and a part of it"),
        (["ppo.seed=2", "ppo=1"], "gives both a setting and a part of it"),
    ],
)
def test_a_text_that_is_no_setting_is_refused(texts: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        read_overrides(texts)


@given(st.lists(st.text(st.sampled_from("a.=[]{}'\"#,\n 1\\") | st.characters(), max_size=20)))
@profile(suppress_health_check=list(HealthCheck), deadline=None, max_examples=200)
def test_any_text_is_read_or_refused(texts: list[str]):
    with suppress(ConfigError):
        assert isinstance(read_overrides(texts), dict)


def test_several_settings_override_the_file_and_leave_the_rest():
    file = {"ppo": {"learning_rate": 1e-5, "kl_coef": 0.2}, "registered_model": "a"}
    made = settings(
        *("ppo.learning_rate=3e-6", "reward_model_training.num_epochs=2", "registered_model=b"),
        file=file,
    )
    assert (made.ppo.learning_rate, made.ppo.kl_coef) == (3e-6, 0.2)
    assert (made.reward_model_training.num_epochs, made.registered_model) == (2, "b")
    assert file["ppo"] == {"learning_rate": 1e-5, "kl_coef": 0.2}


def test_a_part_of_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match=r"rewards=\['reward-model'\] is a value, and rewards.a"):
        settings("rewards.a=1", file={"rewards": ["reward-model"]})


def test_an_optional_number_of_the_file_can_be_unset():
    file = {"judging": {"max_calls": 5}, "ppo": {"stop_token": "eos"}}
    made = settings("judging.max_calls=none", "ppo.stop_token=none", file=file)
    assert made.judging.max_calls is made.ppo.stop_token is None


def test_without_an_input_the_preset_is_overridden():
    made = make_settings({}, {}, ["ppo.total_episodes=64"])
    assert (made.task, made.ppo.total_episodes) == ("tldr", 64)
    with pytest.raises(ConfigError, match="preferences, prompts missing"):
        make_settings({}, {}, ["policy=p"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.batch_size=many", "ppo.batch_size='many' must be a whole number"),
        ("ppo.kl_coeff=0.1", "Unknown setting ppo.kl_coeff. Did you mean ppo.kl_coef?"),
        ("ppo.kl_coef=-1", "kl_coef=-1 must be at least 0"),
        ("ppo=3", "ppo=3 must be a section"),
        ("seed=5", "seed is given by an option and by --set"),
        ("ppo.total_episodes=5", "ppo.total_episodes is given by an option and by --set"),
        ("ppo.hub_token=hf_secret", "^ppo.hub_token holds a secret"),
    ],
)
def test_a_setting_is_checked_as_in_the_file(override: str, message: str):
    with pytest.raises(ConfigError, match=message) as refused:
        settings(override, seed=1, total_episodes=8)
    assert "hf_secret" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        "run --set judging.api_key=abc --set seed=1",
        "run --set=seed=1 --set=judging.api_key=abc",
        "run --tag hf_canary7QxCanary7QxCanary7QxCanary7 --tag weekly",
    ],
)
def test_a_secret_of_a_repeated_option_is_refused_before_metaflow_stores_it(words: str):
    with pytest.raises(ConfigError, match="holds"):
        keep_secrets_from_metaflow(words.split())


def test_a_secret_in_the_variable_of_the_option_is_refused(monkeypatch):
    monkeypatch.setenv("METAFLOW_RUN_SET", "seed=1 judging.api_key=abc")
    with pytest.raises(ConfigError, match=r"judging\.api_key holds a secret"):
        keep_secrets_from_metaflow(["run"])
