"""The settings file of a run: read again, it is the same run."""

import tomllib
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from math import inf
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from pipeline.settings.gate_configs import GuardsConfig
from pipeline.settings.make_settings import make_settings, read_preset, settings_text
from pipeline.settings.settings import INPUTS, NOT_OF_THE_FLOW, Settings
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.row_settings import FIELDS
from ppo_core.errors import ConfigError

SECTIONS = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}

REFUSED = {*NOT_OF_THE_FLOW, "hub_token"}
"""Settings of PPO that the flow never has."""

EXCLUDED = {
    "ppo": {
        *("batch_size", "warmup_ratio", "missing_eos_penalty", "reference_refresh_updates"),
        # It contradicts use_score_scaling.
        "scale_each_reward",
        # Other estimators refuse the settings of the critic, and gae that of grpo.
        *("advantage_estimator", "scale_by_group_std"),
        # Without a judge that chooses, earlier policies would be saved for nothing.
        "save_policies",
        # It needs an eval_strategy.
        "eval_steps",
        *REFUSED,
    },
    # Labels go with the labeller `people` alone, given pairs with no given reward model, and rounds
    # with many pairs and one machine.
    "fresh_pairs": {"labels", "given_weight", "rounds"},
    # It replaces alpha.
    "promotion": {"false_promotion_rate"},
    # A choice needs answers that are plain samples.
    "selection": {"method", "weights", "num_prompts"},
}
"""What cannot be changed beside all other settings."""

OWN = {"policy": "p", "preferences": "a", "prompts": "b", "eval_prompts": "c", "judge": "rule"}


def read_again(settings: Settings, **command_line: Any) -> Settings:
    return make_settings(tomllib.loads(settings_text(settings)), command_line)


@pytest.mark.parametrize("preset", ["tldr", "stories"])
def test_the_file_of_a_preset_s_run_repeats_it(preset: str):
    settings = make_settings(read_preset(preset), {"seed": 3, "output_dir": "elsewhere"})
    assert read_again(settings) == settings
    # To the letter, or the digest of the settings would change: 1 is not 1.0 there.
    assert settings_text(read_again(settings)) == settings_text(settings)


def test_the_file_of_a_run_repeats_it_however_it_was_asked_for():
    settings = make_settings({**OWN, "seed": 2, "ppo": {"seed": 5}}, {"total_episodes": 64})
    assert read_again(settings) == settings
    # The defaults of the sizes are the flow's own, and None is another choice.
    by_parts = {"gradient_accumulation_steps": 4, "num_train_epochs": 2.0}
    settings = make_settings({**OWN, "ppo": by_parts}, {})
    assert settings.ppo.batch_size is settings.ppo.total_episodes is None
    assert read_again(settings) == settings


def test_sizes_that_are_none_stay_none():
    settings = Settings(**OWN, ppo=PPOConfig(warn_kl=15.0))
    assert read_again(settings).ppo.batch_size is None
    assert read_again(settings) == settings


def test_none_is_written_where_leaving_it_out_would_be_another_run():
    settings = Settings(**OWN, ppo=PPOConfig(stop_token=None, warn_kl=15.0))
    assert tomllib.loads(settings_text(settings))["ppo"]["stop_token"] == "none"
    assert read_again(settings).ppo.stop_token is None


def test_none_stays_a_text_where_it_is_a_value_of_the_setting():
    settings = make_settings({**OWN, "ppo": {"sharding": "none"}}, {})
    assert settings.ppo.sharding == "none"
    assert read_again(settings) == settings


def test_another_seed_is_asked_for_on_the_command_line():
    settings = make_settings({**OWN, "seed": 2, "reward_model_training": {"seed": 1}}, {})
    again = read_again(settings, seed=9)
    assert (again.sft.seed, again.reward_model_training.seed, again.ppo.seed) == (9, 1, 9)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a setting's type; most are in the range of most settings."""
    if is_dataclass(kind):
        types = get_type_hints(kind)
        values = st.fixed_dictionaries({}, optional={n: values_of(t) for n, t in types.items()})
        return values.map(lambda given: kind(**valid_part(kind, {}, given)))
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(parts)
    if get_origin(kind) is list:
        return st.lists(values_of(parts[0]), min_size=1, max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(st.sampled_from(FIELDS), values_of(parts[1]))
    if parts:
        return st.one_of(map(values_of, parts))
    return {
        NoneType: st.none(),
        bool: st.booleans(),
        int: st.integers(1, 10**20),
        float: st.floats(0, 1, exclude_min=True, exclude_max=True) | st.just(inf),
        str: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
    }[kind]


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    """Settings of which any may be set to anything that it can be set to."""
    table: dict[str, Any] = {}
    for name, kind in get_type_hints(Settings).items():
        if name in SECTIONS:
            types = {**get_type_hints(kind)}
            types.pop("hub_token", None)  # refused: the settings are stored
            chosen = draw(st.sets(st.sampled_from(sorted(types)), max_size=4))
            values = {one: draw(values_of(types[one])) for one in sorted(chosen)}
            # The default of PPOConfig is above the default of promotion.max_kl.
            kept = {"warn_kl": 15.0} if kind is PPOConfig else {}
            table[name] = kind(**valid_part(kind, kept, values))
        elif name != "task" and draw(st.booleans()):
            table[name] = draw(values_of(kind))
    return Settings(**valid_part(Settings, OWN, table))


def valid_part(kind: Any, kept: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return `kept` with those of the values that can be set together."""
    for name, value in values.items():
        with suppress(ConfigError):
            kind(**(changed := {**kept, name: value}))
            kept = changed
    return kept


@given(all_settings())
@profile(suppress_health_check=list(HealthCheck), deadline=None, max_examples=30)
def test_any_settings_are_read_again_as_they_were(settings: Settings):
    assert read_again(settings) == settings


VALUES = {int: 7, float: 1.5, str: "a", bool: True}


def changed(kind: Any, default: Any) -> Any:
    """Another value than the default of a setting, and one that is in its range."""
    if is_dataclass(kind):
        return kind(r=7, alpha=9, target_modules=["q_proj"], dropout=0.25)
    parts = get_args(kind)
    if get_origin(kind) is dict:
        return {"prompt": "the post", "chosen": 'a "better" one'}
    if default is MISSING:
        return ["q_proj", "v_proj"] if parts[0] is str else [0.75, 0.5]
    if get_origin(kind) is Literal:
        return next(choice for choice in parts if choice != default)
    if default is None:
        inner = next(part for part in parts if part is not NoneType)
        return [0.5, 2.0] if get_origin(inner) is list else VALUES[inner]
    if NoneType in parts:
        return None
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        return f'{default} "Ünïcode" \\ \x7f\n# of two lines'
    if kind is int:
        return default + 4
    return default * 0.75 or 0.25


IN_RANGE = {
    "min_gain": 0.8,
    "guards": GuardsConfig(
        margin=0.1,
        margins={"stops": 0.25, "own": 0.5},
        off=["language"],
        format='(?s)\\{"a".*\\}',
        functions={"own": 'python:my "own".py:f'},
    ),
    "gpus": {'my "own" gpu': {"memory_gib": 22.5}},
    "judge": "openai:a",
    "num_nodes": 1,
    "rewards": ["reward-model", 'own=python:my "own".py:f', "openai:b"],
    "reward_weights": [0.5, 2.0, 1.0],
    "judge_prices": {"openai:a": 0.25},
    "lam_critic": 0.8,
    "ema_decay": 0.9,
    "max_length_ratio": 3.5,
    "warn_entropy": -1.0,
    "warn_kl": 9.0,
    "withdraw_alpha": 0.02,
    "kl_estimator": "full",
    "logging_steps": 2.0,
    "save_steps": 7.0,
    "sharding": "zero2",
    "vllm_server_base_url": "http://gpu:8001",
}
"""Where `changed` would give what is out of range."""


def everything_changed() -> Settings:
    def of(kind: Any, left_out: set[str]) -> dict[str, Any]:
        types = get_type_hints(kind)
        return {
            one.name: IN_RANGE[one.name]
            if one.name in IN_RANGE
            else changed(types[one.name], one.default)
            for one in fields(kind)
            if one.name not in left_out
        }

    sections = {
        name: kind(**of(kind, EXCLUDED.get(name, set()))) for name, kind in SECTIONS.items()
    }
    # Feedback and the champion's run train a reward model, and a given one is not trained.
    left_out = {"task", "feedback", "feedback_weight", "start_from", *SECTIONS}
    return Settings(**{**of(Settings, left_out), "seed": 99, **sections})


def test_a_run_with_every_setting_changed_is_repeated():
    settings = everything_changed()
    assert read_again(settings) == settings
    table = tomllib.loads(settings_text(settings))
    for name, kind in SECTIONS.items():
        default, given = kind(), getattr(settings, name)
        unchanged = {
            one.name
            for one in fields(kind)
            if getattr(default, one.name) == getattr(given, one.name)
        }
        assert unchanged == EXCLUDED.get(name, set())
        assert {one.name for one in fields(kind)} - table[name].keys() <= unchanged


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_relative_paths_stay_as_they_were_given(name: str):
    settings = Settings(**{**OWN, name: "../data/it"})
    assert tomllib.loads(settings_text(settings))[name] == "../data/it"


def test_the_file_says_how_to_use_it():
    text = settings_text(Settings(**OWN))
    assert "#     python flows/rlhf.py --config settings FILE run\n" in text
