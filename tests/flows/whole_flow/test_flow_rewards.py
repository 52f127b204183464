"""A run of the flow with several rewards: tried first, summed by weights, and named at the end."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
import tomli_w

from tests.helpers.inputs.pipeline_inputs import tiny_table, write_rows
from tests.helpers.runs.flow_runs import Ran, client_of, run_flow, runs_of
from tests.helpers.servers.fault_server import fault_server, say
from tests.helpers.servers.mlflow_store import tracking_to

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REWARDS = """
def level(prompts, responses, level):
    return [1000.0 * n for n in level]

def short(prompts, responses):
    return [-0.1 * len(response) for response in responses]

def broken(prompts, responses):
    return [float("nan")] * len(responses)
"""


@dataclass(frozen=True)
class Finished:
    folder: Path
    ran: Ran
    summary: dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    folder: Path = tmp_path_factory.mktemp("flow")
    table = tiny_table(folder) | {
        "registered_model": "rewarded",
        "rewards": ["reward-model", "python:rewards.py:level", "watched=python:rewards.py:broken"],
    }
    # The reward model, which two steps cannot make fit, is only logged.
    table["rewards"] += ["python:rewards.py:short", "openai:scorer"]
    table["ppo"] |= {"reward_weights": [0.0, 1.0, 0.0, 1.0, 1.0], "scale_each_reward": True}
    rows = [json.loads(line) for line in Path(table["prompts"]).read_text().splitlines()]
    write_rows(Path(table["prompts"]), [{**row, "level": n} for n, row in enumerate(rows)])
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "rubric.md").write_text("Short answers have a 10.")
    table["rewards_rubric"] = "rubric.md"
    table["reward_model_training"] = {**table["reward_model_training"], "members": 2}
    with fault_server([say("SCORE: 7", tokens=50)]) as server:
        table["judging"] = {"base_url": server.url}
        table["hardware"] = {"judge_prices": {"openai:scorer": 2.0}}
        (folder / "tiny.toml").write_text(tomli_w.dumps(table))
        words = ("--config", "settings", "tiny.toml", "run", "--summary-json", "summary.json")
        ran = run_flow(folder, *words)
    assert ran.code == 0, ran.log
    return Finished(folder, ran, json.loads((folder / "summary.json").read_text()))


def test_functions_are_tried_before_anything_is_trained(finished: Finished):
    tried = (
        "rewards=python:rewards.py:level: 0 for an answer to another prompt, 1000 for an empty one"
    )
    assert tried in finished.ran.steps["start"]


def test_an_unfit_reward_model_that_is_only_logged_ends_no_run(finished: Finished):
    assert (
        "PPO does not learn from the reward model. The model is not fit, for these reasons:"
        in finished.ran.log
    )
    assert not finished.summary["reward_model"]["fit"]


def test_the_summary_has_the_mean_of_each_reward_and_balances_them(finished: Finished):
    objective = finished.summary["objective"]
    means = {name: one for name, one in objective.items() if name.startswith("rewards/")}
    names = "reward-model level watched short scorer disagreement".split()
    assert means.keys() == {f"rewards/{name}" for name in names}
    assert means["rewards/level"]["last"] > 1000
    assert math.isnan(means["rewards/watched"]["last"])
    assert means["rewards/scorer"]["last"] == 7 and means["rewards/disagreement"]["last"] > 0
    # In standard deviations, not in thousands.
    assert abs(objective["objective/scores"]["last"]) < 10
    assert finished.summary["settings"]["rewards"][1] == "python:rewards.py:level"
    assert "rewards/level" in finished.ran.log
    assert "by the reward model of the run alone" in finished.summary["baselines"]["note"]


def test_the_cost_has_the_calls_of_the_language_model(finished: Finished):
    asked = finished.summary["cost"]["judges"]["openai:scorer"]
    # 24 responses, and answers to 8 watched prompts before the first and after each of 3 updates.
    # Two questions of the first step are not those of the training.
    assert 1 <= asked["calls"] <= 56 and asked["tokens"] == 50 * asked["calls"]
    assert asked["price"] == pytest.approx(0.1 * asked["calls"])


def test_lineage_and_card_name_the_functions(finished: Finished):
    client = client_of(finished.folder)
    (version,) = client.search_model_versions("name='rewarded'")
    run = runs_of(finished.folder, version.tags["flow_run"])["parent"]
    assert run.data.tags["reward/level"].startswith("level@")
    assert run.data.tags["reward/watched"].startswith("broken@")
    with tracking_to(f"sqlite:///{finished.folder / 'mlflow.db'}"):
        card = mlflow.artifacts.load_text(f"models:/rewarded/{version.version}/README.md")
    (line,) = (line for line in card.splitlines() if line.startswith("| reward level"))
    assert "rewards.py:level" in line.replace("\\", ""), line
