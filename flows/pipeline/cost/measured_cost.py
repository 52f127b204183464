"""Compute the cost of a run so far: GPU seconds, tokens, calls of judges, and prices."""

from collections.abc import Mapping, Sequence

from pipeline.cost.gpu_table import Gpu, price_per_hour, read_gpus
from pipeline.cost.usage import Attempt, recorded_attempts
from pipeline.inputs.flow_run import FlowRun
from pipeline.judges.judge_budget import Spent
from pipeline.launch.commands import FoundGpu
from pipeline.results.run_cost import JudgeCost, RunCost, StepCost, TokenCounts, sum_if_known
from pipeline.results.step_records import TrainedPolicy
from pipeline.settings.hardware_config import HardwareConfig


def cost_of_run(
    run: FlowRun, config: HardwareConfig, trained: TrainedPolicy | None, spent: Mapping[str, Spent]
) -> RunCost:
    """Return the cost of a run.

    A price is None if the table of prices lacks it, or if the server of a judge does not report
    tokens. A judge whose price is set to 0 costs 0 even without reported tokens.

    Args:
        run: the run of the flow.
        config: prices of GPUs and judges.
        trained: the policy after PPO, with the numbers of sampled and trained tokens; None before
            PPO.
        spent: calls and tokens of each judge and language model in the run so far.
    """
    gpus, attempts = read_gpus(config), recorded_attempts(run)
    steps = {}
    for name in dict.fromkeys(attempt.step for attempt in attempts):
        own = [attempt for attempt in attempts if attempt.step == name]
        steps[name] = _step(own, [_gpu_price(one, gpus, config.gpu) for one in own])
    judges = {
        name: JudgeCost(**vars(one), price=_judge_price(one.tokens, config.judge_prices.get(name)))
        for name, one in spent.items()
    }
    prices = [*(one.price for one in steps.values()), *(one.price for one in judges.values())]
    return RunCost(
        steps=steps,
        gpu_hours=sum(step.gpu_seconds for step in steps.values()) / 3600,
        tokens=TokenCounts(
            sampled=trained.tokens_sampled if trained else 0,
            trained=trained.tokens_trained if trained else 0,
        ),
        judges=judges,
        price=sum_if_known(prices),
    )


def cost_numbers(cost: RunCost) -> dict[str, float]:
    """Return name of the metric in MLflow -> number; unknown numbers are left out."""
    numbers: dict[str, float | None] = {
        "gpu_hours": cost.gpu_hours,
        "price": cost.price,
        "tokens_sampled": cost.tokens.sampled,
        "tokens_trained": cost.tokens.trained,
        "judge_calls": cost.judge_calls,
        "judge_tokens": cost.judge_tokens,
    }
    for name, step in cost.steps.items():
        numbers[f"{name}/gpu_seconds"] = step.gpu_seconds
        numbers[f"{name}/cpu_seconds"] = step.cpu_seconds
        numbers[f"{name}/price"] = step.price
    return {f"cost/{name}": float(value) for name, value in numbers.items() if value is not None}


def _step(attempts: Sequence[Attempt], prices: Sequence[float | None]) -> StepCost:
    return StepCost(
        attempts=len(attempts),
        seconds=sum(attempt.seconds for attempt in attempts),
        gpus=attempts[-1].gpus * attempts[-1].machines,
        gpu_seconds=sum(attempt.gpu_seconds for attempt in attempts),
        cpu_seconds=sum(attempt.cpu_seconds for attempt in attempts),
        price=sum_if_known(prices),
    )


def _gpu_price(attempt: Attempt, gpus: Mapping[str, Gpu], named: str) -> float | None:
    """Return the price of an attempt; None if the price of its GPUs is unknown.

    The price is 0 without GPUs, because no table has prices of CPUs.
    """
    if not attempt.gpus:
        return 0.0
    per_hour = price_per_hour(FoundGpu(attempt.gpu, attempt.gpu_memory), gpus, named)
    return None if per_hour is None else attempt.gpu_seconds / 3600 * per_hour


def _judge_price(tokens: int | None, per_thousand: float | None) -> float | None:
    if per_thousand == 0:
        return 0.0
    return None if tokens is None or per_thousand is None else tokens / 1000 * per_thousand
