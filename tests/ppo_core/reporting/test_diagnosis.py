"""The diagnosis of a training: recorded bad runs are recognized, and healthy ones are not bad."""

import json
import logging
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from ppo_core import diagnose as command
from ppo_core.checkpointing.folders import MANIFEST, STATE
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.reporting.diagnosis import FEWEST_UPDATES, TRENDS, diagnose, judged_worse
from ppo_core.reporting.health import GUARDS
from ppo_core.reporting.metrics_file import read_metrics
from tests.helpers.paths import ROOT
from tests.helpers.runs.record_bad_runs import Broken, train
from tests.helpers.slow_cases import slow

FOLDER = Path(__file__).parent / "bad_runs"
"""Metrics of trainings that went wrong, which `record_bad_runs` recorded."""

FOUND = {
    "critic-explains-nothing": {"critic explains nothing", "useless critic"},
    "endless-warm-up": {"endless warm-up"},
    "first-pass-off": {"first pass off", "large steps"},
    "large-steps": {"large steps", "ratio too high"},
    "learns-nothing": {"learns nothing", "useless critic"},
    "length-growth": {
        "length growth",
        "far from reference",
        "reward up, divergence too",
        "no end tokens",
        "critic explains nothing",
        "useless critic",
    },
    "loss-spike": {"loss spike"},
    "no-end-tokens": {"no end tokens"},
    "repetition": {
        "repetition",
        "reward for repetition",
        "entropy collapse",
        "far from reference",
        "reward up, divergence too",
        "no end tokens",
    },
    "skipped-steps": {"skipped steps"},
    "slow-callback": {"time lost to waiting"},
    "slow-reward": {"time lost to scoring"},
    "slow-sampling": {"time lost to sampling"},
    "useless-critic": {"useless critic"},
}
"""What is wrong in each of these trainings."""

BAD_RUNS = {
    rule: FOLDER / f"{name}.jsonl" for name, rules in reversed(FOUND.items()) for rule in rules
}
"""A bad training for each rule."""

NOT_RECORDED = {"negative divergence", "ratio too low", "falling reward"}
"""Guards whose limits only `test_health` tries: no setting of today brings them about quickly."""

CONFIG = PPOConfig(total_episodes=1)
"""Default settings of a run that has ended."""


def rules_of(path: Path, config: PPOConfig = CONFIG) -> set[str]:
    return {finding.rule for finding in diagnose(config, read_metrics(path))}


@pytest.mark.parametrize("name", FOUND)
def test_a_recorded_bad_run_is_recognized(name: str):
    updates = read_metrics(FOLDER / f"{name}.jsonl")
    findings = diagnose(CONFIG, updates)
    assert {finding.rule for finding in findings} == FOUND[name]
    assert 10 <= len(updates) <= 60
    for finding in findings:
        assert re.search(r"\d", finding.evidence)
        assert finding.source
        assert finding.rule.capitalize() in str(finding)


def test_each_rule_has_a_recorded_run():
    assert {*BAD_RUNS} | NOT_RECORDED == {*GUARDS, *TRENDS}


def test_the_page_lists_each_rule():
    page = (ROOT / "docs/when-it-goes-wrong.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| (.+) \| .+ \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted(["rule", "reward up, judge down", *GUARDS, *TRENDS])


@pytest.mark.parametrize("trend", TRENDS.values(), ids=TRENDS)
def test_what_a_trend_tells_to_change_are_settings(trend):
    settings = {field.name for field in fields(PPOConfig)}
    text = re.sub(r"\b\w+/\w+", "", trend.advice)
    assert set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", text)) <= settings


@pytest.mark.parametrize("seed", slow(1, 2, 3))
def test_nothing_is_found_in_a_healthy_training(seed: int, caplog):
    with caplog.at_level(logging.WARNING):
        updates = train(seed=seed, updates=FEWEST_UPDATES)
    assert updates[-1]["objective/scores"] > updates[0]["objective/scores"]
    assert diagnose(CONFIG, updates) == []
    assert "wrong" not in caplog.text


def test_a_training_ends_with_what_was_wrong(caplog):
    with caplog.at_level(logging.WARNING):
        train(updates=3, reward=Broken(2))
    last = caplog.messages[-1]
    assert last.startswith("What was wrong in this training: Update 2. Skipped steps: ")
    assert "max_skipped_steps" in last


def run_of(**series: list[float]) -> list[dict[str, float]]:
    """Return 20 updates of 1,000 responses and ten seconds each, with these metrics."""
    return [
        {"update": n + 1, "episode": 1000.0 * (n + 1), "eps": 100.0}
        | {name: values[n] for name, values in series.items()}
        for n in range(20)
    ]


STEADY = [1.0, 1.1] * 10
RISING = [n + n % 2 for n in range(20)]


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ("loss spike", *({"loss/value_avg": [1.0] * 19 + [last]} for last in (5.0, 5.1))),
        (
            "loss spike",
            *({"loss/value_avg": [1.0] * 9 + [math.nan] + [1.0] * 9 + [n]} for n in (5.0, 5.1)),
        ),
        ("useless critic", *({"val/explained_variance": [ev] * 20} for ev in (0.01, 0.0))),
        ("no end tokens", *({"val/num_eos_tokens": [51] * 10 + [n] * 10} for n in (10, 9))),
        ("no end tokens", *({"val/num_eos_tokens": [n] * 20} for n in (2.0, 1.9))),
        (
            "learns nothing",
            *(
                {"policy/clipfrac_avg": [share] * 20, "objective/scores": STEADY}
                for share in (0.001, 0.0009)
            ),
        ),
        (
            "learns nothing",
            *(
                {"policy/clipfrac_avg": [0.0] * 20, "objective/scores": scores}
                for scores in (RISING, STEADY)
            ),
        ),
        (
            "reward up, divergence too",
            *({"objective/kl": [kl] * 20, "objective/scores": RISING} for kl in (50.0, 50.1)),
        ),
        (
            "reward up, divergence too",
            *({"objective/kl": [60.0] * 20, "objective/scores": each} for each in (STEADY, RISING)),
        ),
        ("endless warm-up", *({"lr": [*range(19), last]} for last in (18, 19))),
        ("time lost to sampling", *({"time/sampling": [time] * 20} for time in (8.0, 8.1))),
        ("time lost to scoring", *({"time/scoring": [time] * 20} for time in (5.0, 5.1))),
        ("time lost to waiting", *({"time/updating": [time] * 20} for time in (5.0, 4.9))),
    ],
)
def test_a_trend_begins_beyond_its_limit(rule: str, good, bad):
    found = [{each.rule for each in diagnose(CONFIG, run_of(**one))} for one in (good, bad)]
    assert [rule in rules for rules in found] == [False, True]


@pytest.mark.parametrize(("time", "found"), [(5.0, False), (4.9, True)])
def test_a_resumed_run_without_the_metrics_before_it_has_waited_only_since(time, found: bool):
    resumed = run_of(**{"time/updating": [time] * 20})[10:]
    assert ("time lost to waiting" in {each.rule for each in diagnose(CONFIG, resumed)}) is found


def test_without_an_update_nothing_is_wrong():
    assert diagnose(CONFIG, []) == []


@pytest.mark.parametrize(
    ("total", "steps", "found"),
    [
        (20_000, -1, True),
        (20_001, -1, False),
        (20_001, 20, True),
        (None, -1, False),
        (None, 21, False),
        (None, 20, True),
    ],
)
def test_a_warm_up_is_not_endless_before_the_run_has_ended(
    total: int | None, steps: int, found: bool
):
    config = PPOConfig(total_episodes=total, max_steps=steps)
    rules = {each.rule for each in diagnose(config, run_of(lr=[*range(20)]))}
    assert ("endless warm-up" in rules) is found


def test_a_run_without_a_stop_token_need_not_stop():
    without = PPOConfig(stop_token=None)
    assert "no end tokens" not in rules_of(BAD_RUNS["no end tokens"], without)
    by_id = PPOConfig(stop_token=None, stop_token_id=0)
    assert "no end tokens" in rules_of(BAD_RUNS["no end tokens"], by_id)


def test_a_limit_of_the_run_is_the_limit_of_the_diagnosis():
    loose = PPOConfig(warn_kl=1e6)
    assert "far from reference" not in rules_of(BAD_RUNS["far from reference"], loose)


@pytest.mark.parametrize(
    ("first", "last", "high", "found"),
    [(0.1, 0.9, 0.45, 1), (0.1, 0.9, 0.5, 0), (0.9, 0.1, 0.45, 0), (0.1, math.nan, 0.4, 0)],
)
def test_a_judge_contradicts_a_reward_that_rose(first, last, high, found):
    findings = judged_worse(first, last, (0.3, 0.2, high))
    assert len(findings) == found
    assert all("wins 30.0%" in finding.evidence for finding in findings)


def folder_with(path: Path, name: str, run: Path) -> Path:
    """Return a folder with a recorded bad run."""
    folder = path / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(run.read_bytes())
    return folder


def test_the_command_finds_metrics_and_settings(tmp_path: Path, capsys):
    run = BAD_RUNS["no end tokens"]
    flow = folder_with(tmp_path, "run/ppo", run)
    (flow / "settings.json").write_text(json.dumps({"stop_token": None, "dataset_name": "x"}))
    library = folder_with(tmp_path, "output", run) / "checkpoint-5"
    library.mkdir()
    (library / MANIFEST).write_text("{}")
    # A checkpoint lacks vllm_weights_dir, because the folder does not change the result.
    settings = {"stop_token": None, "use_vllm": True, "vllm_importance_sampling_cap": 3.0}
    # Version 0.1 wrote a kl_horizon into every checkpoint.
    settings |= {"kl_target": None, "kl_horizon": 10_000}
    (library / STATE).write_text(json.dumps({"identity": {"settings": settings}}))
    for place, found in ((flow.parent, 0), (flow, 0), (library.parent, 0), (run, 1)):
        assert command.main([str(place)]) == 0
        assert capsys.readouterr().out.count("No end tokens\n  Evidence: ") == found


@pytest.mark.parametrize(
    ("updates", "judged"), [(3, "No trend was"), (10, "Not every trend was"), (20, "")]
)
def test_the_command_says_so_if_nothing_is_wrong(updates, judged, tmp_path: Path, capsys):
    lines = [json.dumps({"update": n, "objective/kl": 1.0}) for n in range(1, updates + 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert command.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    short = f"{judged} judged, because trends need 10 to 20 updates.\n" if judged else ""
    assert out.endswith(f": {updates} updates\n{short}Nothing was found.\n")
