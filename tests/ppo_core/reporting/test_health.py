"""Guards: they warn when something begins, in words that name what to change."""

import json
import re
from dataclasses import fields

import pytest

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import TrainingError
from ppo_core.reporting.health import GUARDS, HealthMonitor

NAN = float("nan")
CONFIG = PPOConfig(
    warn_kl=10.0,
    warn_ratio=2.0,
    warn_entropy=0.05,
    warn_explained_variance=-0.5,
    warn_length_growth=2.0,
    warn_repetition=0.5,
    max_skipped_steps=3,
)
HEALTHY = {
    "objective/kl": 4.0,
    "val/ratio": 1.0,
    "policy/entropy_avg": 2.0,
    "val/explained_variance": 0.3,
    "val/response_length": 20.0,
    "val/repetition": 0.1,
}


def monitor() -> HealthMonitor:
    """One that has seen a healthy first update."""
    healthy = HealthMonitor(CONFIG)
    assert healthy.check(HEALTHY) == []
    return healthy


@pytest.mark.parametrize(
    ("metric", "good", "bad", "words"),
    [
        ("objective/kl", 10.0, 10.1, r"10\.1, above 10 \(warn_kl\).*kl_coef"),
        ("objective/kl", -1.0, -1.1, r"-1\.1, below -1 .*top_k=0"),
        ("val/ratio", 2.0, 2.1, r"2\.1, above 2 \(warn_ratio\).*learning_rate"),
        ("val/ratio", 0.1, 0.09, r"0\.09, below 0\.1 \(1 / \(5 x warn_ratio\)\).*learning_rate"),
        ("policy/entropy_avg", 0.1, 0.09, r"0\.09, below 0\.1 \(warn_entropy x .*temperature"),
        ("val/response_length", 40.0, 41.0, r"41, above 40 \(warn_length_growth x .*length_pen"),
        ("val/repetition", 0.5, 0.6, r"0\.6, above 0\.5 \(warn_repetition\).*kl_coef"),
    ],
)
def test_a_metric_warns_only_beyond_its_limit(metric, good, bad, words):
    watched = monitor()
    assert watched.check(HEALTHY | {metric: good}) == []
    (message,) = watched.check(HEALTHY | {metric: bad})
    assert re.search(f"{metric} is {words}", message)


def test_the_critic_is_warned_about_only_after_three_bad_updates_in_a_row():
    watched = HealthMonitor(CONFIG)
    history = [-0.6, -0.6, -0.5, -0.6, -0.6, -0.6, -0.6]
    warned = [len(watched.check({"val/explained_variance": value})) for value in history]
    assert warned == [0, 0, 0, 0, 0, 1, 0]


def test_length_is_compared_with_the_first_update():
    watched = HealthMonitor(CONFIG)
    lengths = [5.0, 10.0, 10.1]
    assert [len(watched.check({"val/response_length": n})) for n in lengths] == [0, 0, 1]


def test_a_condition_warns_once_in_a_run_also_when_it_comes_back():
    watched = monitor()
    history = [11.0, 12.0, 4.0, 11.0, 11.0]
    assert [len(watched.check({"objective/kl": kl})) for kl in history] == [1, 0, 0, 0, 0]


def test_entropy_is_compared_with_the_first_update():
    # The built-in task: 3.4 nats a response at first, 0.48 at last, over some 10 tokens.
    healthy = HealthMonitor(CONFIG)
    for nats in (0.34, 0.2, 0.1, 0.06, 0.048, 0.052, 0.046, 0.048):
        assert healthy.check({"policy/entropy_avg": nats}) == []
    collapsed = HealthMonitor(CONFIG)
    history = (2.0, 0.11, 0.09, 0.2, 0.01)
    assert [len(collapsed.check({"policy/entropy_avg": nats})) for nats in history] == [
        0, 0, 1, 0, 0
    ]  # fmt: skip


def test_several_conditions_warn_together():
    assert len(monitor().check(HEALTHY | {"objective/kl": 99.0, "val/repetition": 0.9})) == 2


def test_what_an_update_did_not_measure_changes_nothing():
    watched = monitor()
    assert len(watched.check({"objective/kl": 11.0})) == 1
    assert watched.check({}) == []
    assert watched.check({"objective/kl": 11.0}) == []


def test_a_metric_that_is_not_a_number_is_not_judged():
    assert monitor().check(dict.fromkeys(HEALTHY, NAN)) == []


def test_a_resumed_monitor_goes_on_as_the_first_would_have():
    first = monitor()
    bad = {"val/explained_variance": -2.0, "objective/kl": 11.0}
    first.check(HEALTHY | bad)
    first.check(HEALTHY | bad)
    resumed = HealthMonitor(CONFIG)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    then = HEALTHY | bad | {"val/response_length": 41.0}
    messages = resumed.check(then)
    assert len(messages) == 2
    assert messages == first.check(then)


def test_a_state_of_an_earlier_version_is_resumed():
    resumed = HealthMonitor(CONFIG)
    in_a_row = dict.fromkeys(GUARDS, 0) | {"far from reference": 2, "critic explains nothing": 2}
    resumed.load_state_dict({"first_length": 20.0, "in_a_row": in_a_row})
    bad = {"val/explained_variance": -2.0, "objective/kl": 11.0, "val/response_length": 41.0}
    warned = [message.partition(":")[0] for message in resumed.check(HEALTHY | bad)]
    assert warned == ["Critic explains nothing", "Length growth"]


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
def test_what_a_guard_tells_to_change_are_settings(guard):
    settings = {field.name for field in fields(PPOConfig)}
    text = re.sub(r"\b\w+/\w+", "", f"{guard.rule} {guard.words}")
    named = set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", text))
    assert named <= settings
    assert named - {guard.rule}


@pytest.mark.parametrize("in_a_row", [0, 1, 2])
def test_few_skipped_steps_are_borne(in_a_row):
    monitor().check_skipped(in_a_row)


@pytest.mark.parametrize("in_a_row", [3, 4])
def test_too_many_skipped_steps_in_a_row_end_the_run(in_a_row):
    with pytest.raises(TrainingError, match=rf"{in_a_row} .*max_skipped_steps=3.*last good step"):
        monitor().check_skipped(in_a_row)
