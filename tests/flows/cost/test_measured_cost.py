"""The cost of a run, from its attempts, its judges and the prices of the settings."""

import json
from pathlib import Path

import pytest

from pipeline.cost.measured_cost import cost_numbers, cost_of_run
from pipeline.inputs.flow_run import FlowRun
from pipeline.judges.judge_budget import Budget, Spent
from pipeline.reports.terminal import cost_in_words
from pipeline.results.run_cost import JudgeCost, RunCost, StepCost, TokenCounts
from pipeline.results.step_records import TrainedPolicy
from pipeline.settings.hardware_config import HardwareConfig
from pipeline.storage.workspace import Workspace

TRAINED = TrainedPolicy(
    path="policy",
    digest="",
    objective={},
    warnings=[],
    episodes_per_second=1.0,
    peak_rss_bytes=2**20,
    tokens_sampled=1_000,
    tokens_trained=4_000,
    self_check={},
)

ON_CPU = {"step": "load_policy", "started": 0.0, "seconds": 100.0, "cpu_seconds": 150.0}
ON_L4 = {
    "step": "train_policy",
    "started": 100.0,
    "seconds": 1800.0,
    "cpu_seconds": 60.0,
    "machines": 2,
    "gpus": 4,
    "gpu": "NVIDIA L4",
    "gpu_memory": 24 * 10**9,
}


@pytest.fixture
def run(tmp_path: Path) -> FlowRun:
    workspace = Workspace(folder=str(tmp_path))
    made = FlowRun(id="RLHF/7", workspace=workspace, tracking={}, origin={}, data=[])
    (made.folder / "usage").mkdir(parents=True)
    attempts = [ON_CPU, ON_L4, ON_L4 | {"started": 2000.0, "seconds": 900.0}]
    for number, attempt in enumerate(attempts):
        (made.folder / "usage" / f"{number}.json").write_text(json.dumps(attempt))
    return made


def cost(run: FlowRun, **config) -> RunCost:
    spent = {"openai:gpt": Spent(calls=40, tokens=20_000)}
    return cost_of_run(run, HardwareConfig(**config), TRAINED, spent)


def test_the_cost_by_hand(run: FlowRun):
    config = {"gpus": {"l4-24gb": {"price_per_hour": 0.5}}, "judge_prices": {"openai:gpt": 0.01}}
    found = cost(run, **config)
    # Two attempts of 1800 and 900 s on 2 x 4 GPUs are 21,600 GPU seconds: 6 hours at 0.5.
    assert found.steps["train_policy"] == StepCost(
        attempts=2,
        seconds=2700.0,
        gpus=8,
        gpu_seconds=21_600.0,
        cpu_seconds=120.0,
        price=pytest.approx(3.0),
    )
    assert found.steps["load_policy"].price == 0
    assert found.gpu_hours == 6
    # 20,000 tokens at 0.01 for 1,000.
    judge = JudgeCost(calls=40, tokens=20_000, price=pytest.approx(0.2))
    assert found.judges == {"openai:gpt": judge}
    assert found.price == pytest.approx(3.2)
    assert found.tokens == TokenCounts(sampled=1_000, trained=4_000)
    numbers = cost_numbers(found)
    assert numbers["cost/gpu_hours"] == 6
    assert numbers["cost/train_policy/gpu_seconds"] == 21_600
    assert numbers["cost/tokens_sampled"] == 1_000
    assert (numbers["cost/judge_calls"], numbers["cost/judge_tokens"]) == (40, 20_000)


def test_a_sum_with_an_unknown_price_is_unknown(run: FlowRun):
    found = cost(run)
    # The table has the L4's price, and nobody said what the judge costs.
    assert found.steps["train_policy"].price > 0
    assert found.judges["openai:gpt"].price is None
    assert found.price is None
    assert "cost/price" not in cost_numbers(found)


def test_the_gpu_that_was_used_has_the_price_and_not_the_one_in_the_settings(run: FlowRun):
    found = cost(run, gpu="h100-80gb", judge_prices={"openai:gpt": 0.01})
    assert found.steps["train_policy"].price == pytest.approx(6 * 0.80)


def test_tokens_that_a_server_does_not_report_are_unknown(run: FlowRun):
    budget = Budget(max_calls=None, max_tokens=None)
    for tokens in (7, None):
        budget.start_call("openai:gpt", 1)
        budget.add_tokens("openai:gpt", tokens)
    spent = {"openai:gpt": Spent(calls=2, tokens=None)}
    assert budget.spent({}) == spent
    # An evaluation that goes on has tokens of its own, and the sum stays unknown.
    later = Budget(max_calls=None, max_tokens=None)
    later.start_call("openai:gpt", 1)
    later.add_tokens("openai:gpt", 7)
    assert later.spent(spent) == {"openai:gpt": Spent(calls=3, tokens=None)}

    for price, expected in ((0.01, None), (0.0, 0.0)):
        config = HardwareConfig(judge_prices={"openai:gpt": price})
        found = cost_of_run(run, config, TRAINED, spent)
        assert found.judges["openai:gpt"].price == expected
        assert (found.price is None) == (expected is None)
        assert "cost/judge_tokens" not in cost_numbers(found)
        assert "2 calls of judges with an unknown number of tokens" in cost_in_words(found)
