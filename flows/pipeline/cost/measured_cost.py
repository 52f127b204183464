"""What a run has cost so far: GPU seconds, tokens, calls of judges, and their price."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.cost.gpu_table import Gpu, price_per_hour, read_gpus
from pipeline.cost.usage import Attempt, recorded_attempts
from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.commands import FoundGpu
from pipeline.results.step_records import EvaluatedPolicy, TrainedPolicy
from pipeline.settings.hardware_config import HardwareConfig


def cost_of_run(
    run: FlowRun,
    config: HardwareConfig,
    trained: TrainedPolicy,
    evaluation: EvaluatedPolicy,
) -> dict[str, Any]:
    """Return the cost of a run as JSON values; what is unknown is None.

    A price is unknown if a table lacks it, or a server does not report tokens.

    Returns:
        `steps`: by step, its `attempts`, `seconds`, `gpus`, `gpu_seconds`, `cpu_seconds` and
        `price`; `gpu_hours`; `tokens` with `sampled` and `trained`; `judges`: by model, `calls`,
        `tokens` and `price`; and `price`, the sum of all. Prices are in US dollars.
    """
    steps, gpus = {}, read_gpus(config)
    attempts = recorded_attempts(run)
    for name in dict.fromkeys(attempt.step for attempt in attempts):
        own = [attempt for attempt in attempts if attempt.step == name]
        steps[name] = _step(own, [_gpu_price(one, gpus, config.gpu) for one in own])
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
        "judge_tokens": _tokens_of(cost["judges"].values()),
    }
    for step, spent in cost["steps"].items():
        numbers |= {f"{step}/{n}": spent[n] for n in ("gpu_seconds", "cpu_seconds", "price")}
    return {f"cost/{name}": float(value) for name, value in numbers.items() if value is not None}


def _tokens_of(judges: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the tokens of all judges; None if a server did not report them."""
    tokens = [judge["tokens"] for judge in judges]
    return None if None in tokens else sum(tokens)


def _step(attempts: Sequence[Attempt], prices: Sequence[float | None]) -> dict[str, Any]:
    return {
        "attempts": len(attempts),
        "seconds": sum(attempt.seconds for attempt in attempts),
        "gpus": attempts[-1].gpus * attempts[-1].machines,
        "gpu_seconds": sum(attempt.gpu_seconds for attempt in attempts),
        "cpu_seconds": sum(attempt.cpu_seconds for attempt in attempts),
        "price": None if None in prices else sum(price or 0.0 for price in prices),
    }


def _gpu_price(attempt: Attempt, gpus: Mapping[str, Gpu], named: str) -> float | None:
    """Return the price of an attempt; 0 without GPUs, because no table has prices of CPUs."""
    if not attempt.gpus:
        return 0.0
    per_hour = price_per_hour(FoundGpu(attempt.gpu, attempt.gpu_memory), gpus, named)
    return None if per_hour is None else attempt.gpu_seconds / 3600 * per_hour


def _judge_price(tokens: int | None, per_thousand: float | None) -> float | None:
    if per_thousand == 0:
        return 0.0
    return None if tokens is None or per_thousand is None else tokens / 1000 * per_thousand
