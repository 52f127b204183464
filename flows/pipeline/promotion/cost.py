"""What a run has cost so far: GPU seconds, tokens, calls of judges, and their price."""

from collections.abc import Mapping
from typing import Any

from pipeline.evaluation.results import EvaluatedPolicy, TrainedPolicy
from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.commands import FoundGpu
from pipeline.launch.gpu_table import price_per_hour
from pipeline.launch.usage import Attempt, attempts_of
from pipeline.settings.hardware_config import HardwareConfig


def cost_of_run(
    run: FlowRun,
    config: HardwareConfig,
    trained: TrainedPolicy,
    evaluation: EvaluatedPolicy,
) -> dict[str, Any]:
    """Return the cost of a run as JSON values; a price is None if a table lacks it.

    Returns:
        `steps`: by step, its `attempts`, `seconds`, `gpus`, `gpu_seconds`, `cpu_seconds` and
        `price`; `gpu_hours`; `tokens` with `sampled` and `trained`; `judges`: by model, `calls`,
        `tokens` and `price`; and `price`, the sum of all. Prices are in US dollars.
    """
    steps = {}
    attempts = attempts_of(run)
    for name in dict.fromkeys(attempt.step for attempt in attempts):
        steps[name] = _step([one for one in attempts if one.step == name], config)
    judges = {
        name: {**spent, "price": _judge_price(spent["tokens"], config.judge_prices.get(name))}
        for name, spent in evaluation.report()["spent"].items()
    }
    prices = [one["price"] for one in (*steps.values(), *judges.values())]
    return {
        "steps": steps,
        "gpu_hours": sum(step["gpu_seconds"] for step in steps.values()) / 3600,
        "tokens": {"sampled": trained.tokens_sampled, "trained": trained.tokens_trained},
        "judges": judges,
        "price": None if None in prices else sum(prices),
    }


def cost_numbers(cost: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a cost by their names in MLflow, without prices that are unknown."""
    numbers = {
        "gpu_hours": cost["gpu_hours"],
        "price": cost["price"],
        **{f"tokens_{name}": number for name, number in cost["tokens"].items()},
        "judge_calls": sum(judge["calls"] for judge in cost["judges"].values()),
        "judge_tokens": sum(judge["tokens"] for judge in cost["judges"].values()),
    }
    for step, spent in cost["steps"].items():
        numbers |= {f"{step}/{n}": spent[n] for n in ("gpu_seconds", "cpu_seconds", "price")}
    return {f"cost/{name}": float(value) for name, value in numbers.items() if value is not None}


def _step(attempts: list[Attempt], config: HardwareConfig) -> dict[str, Any]:
    prices = [_gpu_price(attempt, config) for attempt in attempts]
    return {
        "attempts": len(attempts),
        "seconds": sum(attempt.seconds or 0.0 for attempt in attempts),
        "gpus": attempts[-1].gpus * attempts[-1].machines,
        "gpu_seconds": sum(attempt.gpu_seconds for attempt in attempts),
        "cpu_seconds": sum(attempt.cpu_seconds for attempt in attempts),
        "price": None if None in prices else sum(price or 0.0 for price in prices),
    }


def _gpu_price(attempt: Attempt, config: HardwareConfig) -> float | None:
    """Return the price of an attempt; 0 without GPUs, because no table has prices of CPUs."""
    if not attempt.gpus:
        return 0.0
    per_hour = price_per_hour(config, FoundGpu(attempt.gpu, attempt.gpu_memory))
    return None if per_hour is None else attempt.gpu_seconds / 3600 * per_hour


def _judge_price(tokens: int, per_thousand: float | None) -> float | None:
    return None if per_thousand is None else tokens / 1000 * per_thousand
