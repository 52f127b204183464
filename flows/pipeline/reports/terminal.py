"""Render the summary of a run as tables in the terminal."""

import io
from collections.abc import Mapping
from shlex import quote

from rich.console import Console
from rich.table import Table

from pipeline.registry.decisions import Decision
from pipeline.reports.baselines import BASELINE_COLUMNS, baseline_rows, worth_of_ppo
from pipeline.reports.document import (
    GUARD_COLUMNS,
    as_decimal,
    as_equal_length_rate,
    as_interval,
    as_points,
    guard_cells,
)
from pipeline.results.evaluation import ContestResult, GuardResult, PairedDifference
from pipeline.results.reward_report import RewardReport
from pipeline.results.run_cost import RunCost
from pipeline.results.summary import Summary

CONTEST_TITLES = {
    "sft_vs_reference": "SFT against the references",
    "ppo_vs_reference": "PPO against the references",
    "ppo_vs_sft": "PPO against SFT",
    "ppo_vs_champion": "PPO against the champion",
}
"""Titles of all contests."""

SHOWN_METRICS = ("objective/scores", "objective/rlhf_reward", "objective/kl", "objective/entropy")


def render_summary(summary: Summary) -> str:
    """Return the summary as text, 106 columns wide."""
    # Markup is off, because names of judges and data sets may contain brackets.
    console = Console(file=io.StringIO(), width=106, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(_win_rates(summary.win_rate))
        if summary.guards:
            console.print(_guards(summary.guards))
        if summary.baselines:
            console.print(_without_ppo(summary))
            for sentence in worth_of_ppo(summary.baselines):
                console.print(sentence)
        console.print(_the_rest(summary))
        for note in summary.notes:
            console.print(f"Note: {note}")
        for reason in summary.reasons:
            console.print(f"Inconclusive: {reason}")
        for warning in summary.warnings:
            console.print(f"Warning: {warning}")
        console.print(_promotion(summary.model, summary.promotion))
    return capture.get()


def decision_in_words(version: int, champion: int | None) -> str:
    """Return `champion` if `version` is the champion; otherwise a text that names the champion."""
    if champion == version:
        return "champion"
    if champion is None:
        return "refused, and there is no champion"
    return f"refused, and version {champion} stays champion"


def reward_verdict(report: RewardReport) -> str:
    """Return the verdict on a reward model: `fit`, `refused` or `accepted by hand`."""
    if report.accepted_by_hand:
        return "accepted by hand"
    return "fit" if report.fit else "refused"


def reward_model_in_words(report: RewardReport) -> str:
    """Return a text: the verdict on a reward model, the win rate of its choices, its accuracy."""
    accuracy, chosen = report.accuracy, ""
    if found := report.on_policy:
        chosen = (
            f"{found.usefulness} for this policy: the best of four of its answers wins "
            f"{found.best_of['4']:.1%}, 95 % interval {as_interval(found)}, judged by "
            f"{found.judge}; "
        )
    if people := report.people:
        chosen += (
            f"orders {people.accuracy:.1%} of {people.n} pairs of answers as people do, 95 % "
            f"interval {as_interval(people)}; "
        )
    return (
        f"{reward_verdict(report)}, {chosen}right in {accuracy.accuracy:.1%} of {accuracy.n} "
        f"held-out pairs, 95 % interval {as_interval(accuracy)}"
    )


def _win_rates(win_rates: Mapping[str, ContestResult]) -> Table:
    judge = win_rates["ppo_vs_sft"].judge
    table = Table("", title=f"Win rates, judged by {judge}", title_justify="left")
    for column in ("wins", "95 % interval", "same length", "pairs", "ties", "flips", "invalid"):
        table.add_column(column, justify="right")
    for name, win_rate in win_rates.items():
        table.add_row(
            CONTEST_TITLES[name],
            f"{win_rate.rate:.1%}",
            as_interval(win_rate),
            as_equal_length_rate(win_rate),
            str(win_rate.n),
            str(win_rate.ties),
            f"{win_rate.flip_rate:.1%}",
            str(win_rate.invalid),
        )
    return table


def _guards(guards: Mapping[str, GuardResult]) -> Table:
    table = Table("", title="Guards", title_justify="left")
    for column in GUARD_COLUMNS:
        table.add_column(column, justify="right")
    for name, guard in guards.items():
        table.add_row(name, *guard_cells(guard))
    return table


def _without_ppo(summary: Summary) -> Table:
    table = Table("", title="What SFT reaches without PPO", title_justify="left")
    for column in BASELINE_COLUMNS:
        table.add_column(column, justify="right")
    for row in baseline_rows(summary):
        table.add_row(*row)
    return table


def _the_rest(summary: Summary) -> Table:
    table = Table(show_header=False)
    timings, kl = summary.timings, summary.kl["ppo"]
    table.add_row("Reward model", reward_model_in_words(summary.reward_model))
    if summary.improvement:
        table.add_row("PPO gained on SFT", _improvement(summary.improvement))
    parts = [name for name in summary.objective if name.startswith("rewards/")]
    for name in [*(parts if len(parts) > 1 else []), *SHOWN_METRICS]:
        metric = summary.objective[name]
        table.add_row(name, f"{as_decimal(metric.first, 3)} -> {as_decimal(metric.last, 3)}")
    table.add_row(
        "KL of an answer", "greedy, not measured" if kl is None else f"{as_decimal(kl, 2)} nats"
    )
    table.add_row("Distinct answers", f"{summary.distinct['ppo']:.1%}")
    table.add_row(
        "Seconds",
        ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in timings.seconds.items()),
    )
    table.add_row(
        "PPO",
        f"{timings.episodes_per_second:.1f} episodes/s, "
        f"peak memory {timings.peak_rss_bytes / 2**30:.2f} GiB",
    )
    table.add_row("Cost", cost_in_words(summary.cost))
    return table


def cost_in_words(cost: RunCost) -> str:
    """Return the measured cost of a run in one line; an unknown price is described as unknown."""
    cpu, judged = sum(step.cpu_seconds for step in cost.steps.values()), cost.judge_tokens
    parts = [
        f"{cost.gpu_hours:.2f} GPU hours, {cpu / 3600:.2f} CPU hours",
        f"{cost.tokens.sampled:,} tokens sampled and {cost.tokens.trained:,} trained by PPO",
        f"{cost.judge_calls:,} calls of judges with "
        f"{'an unknown number of' if judged is None else f'{judged:,}'} tokens",
    ]
    price = "no price, because that of a GPU, or price or tokens of a judge are unknown"
    if cost.price is not None:
        price = f"{cost.price:.2f} US dollars for GPUs and judges"
    return "; ".join([*parts, price])


def _promotion(model: Mapping[str, str], promotion: Decision) -> Table:
    table = Table(show_header=False, title="Promotion", title_justify="left")
    decided = decision_in_words(promotion.version, promotion.champion)
    table.add_row("Registered", f"{model['uri']}, {decided}")
    for reason in promotion.reasons:
        table.add_row("", reason)
    if promotion.champion != promotion.version:
        chosen = f"{quote(model['name'])} {model['version']}"
        table.add_row("To overrule", f"python flows/registry.py promote {chosen} --reason TEXT")
    return table


def _improvement(difference: PairedDifference) -> str:
    points, interval = as_points(difference)
    return f"{points} against the references, 95 % interval {interval}"
