"""Render the results of a run for the terminal, and say where all results are."""

import io
from collections.abc import Iterable, Mapping
from shlex import quote

from rich.console import Console
from rich.table import Table

from pipeline.registry.decisions import Decision
from pipeline.reports.baselines import worth_of_ppo
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
"""Name of a contest -> its title."""

WIDTH = 100
"""Maximum number of characters in a line."""

SHOWN_METRICS = ("objective/scores", "objective/rlhf_reward", "objective/kl", "objective/entropy")


def render_summary(summary: Summary) -> str:
    """Return the summary as text; a line has at most WIDTH characters.

    No line begins with a space, because Metaflow would remove it. The HTML page of the run has more
    tables.
    """
    # Markup is off, because names of judges and data sets may contain brackets.
    console = Console(file=io.StringIO(), width=WIDTH, markup=False, emoji=False, color_system=None)
    with console.capture() as capture:
        console.print(f"Win rates, judged by {summary.win_rate['ppo_vs_sft'].judge}")
        console.print(_win_rates(summary.win_rate))
        for line in _the_rest(summary):
            console.print(line)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def render_places(*, page: str, run_id: str, mlflow: str, model: str, decision: Decision) -> str:
    """Return the last lines of a run: where its results are, and what to do next.

    Args:
        page: sentence that says where the HTML page of the run is.
        run_id: Metaflow's id of the run. A resumed run has a new id.
        mlflow: address of the run in MLflow, or the command that opens MLflow.
        model: name of the registered model.
        decision: the decision on the policy.
    """
    version, name = decision.version, quote(model)
    next_move = f"mlflow models serve -m {quote(f'models:/{model}@champion')} --env-manager local"
    if not decision.is_promoted:
        next_move = f"to overrule, python flows/registry.py promote {name} {version} --reason TEXT"
    lines = [
        page,
        f"Card: python flows/rlhf.py card view {run_id}/evaluate_win_rate",
        f"MLflow: {mlflow}",
        f"Policy: models:/{model}/{version}, {decision_in_words(decision)}",
        f"Next: {next_move}",
    ]
    return "".join(f"{line}\n" for line in lines)


def decision_in_words(decision: Decision) -> str:
    """Return `champion` if the version was promoted; otherwise, a text about the refusal."""
    if decision.is_promoted:
        return "champion"
    if decision.champion is None:
        return "refused, and there is no champion"
    return f"refused, and version {decision.champion} stays champion"


def reward_verdict(report: RewardReport) -> str:
    """Return the verdict on a reward model: `fit`, `refused` or `accepted by hand`."""
    if report.accepted_by_hand:
        return "accepted by hand"
    return "fit" if report.fit else "refused"


def reward_model_in_words(report: RewardReport) -> str:
    """Describe a reward model: verdict, wins of its choices, agreement with people, accuracy."""
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
    columns = ("wins", "95 % interval", "same length", "pairs", "ties", "flips", "invalid")
    table = _table("contest", columns)
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


def _guards(guards: Mapping[str, GuardResult]) -> list[str | Table]:
    """Return a line with the passed guards, and a table of the guards that refused the policy."""
    passed = [name for name, guard in guards.items() if guard.passed]
    parts: list[str | Table] = [f"Guards passed: {', '.join(passed)}"] if passed else []
    if refused := {name: guard for name, guard in guards.items() if not guard.passed}:
        table = _table("guard", (column or "result" for column in GUARD_COLUMNS))
        for name, guard in refused.items():
            table.add_row(name, *guard_cells(guard))
        parts.append(table)
    return parts


NAME_WIDTH = 30
"""Maximum characters in the first column; a longer name would leave no room for the numbers."""


def _table(first_column: str, columns: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    # A wrapped row would begin its second line with spaces, which Metaflow would remove.
    table.add_column(first_column, no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _the_rest(summary: Summary) -> list[str | Table]:
    kl = summary.kl["ppo"]
    lines: list[str | Table] = []
    if summary.improvement:
        lines.append(f"PPO gained on SFT: {_improvement(summary.improvement)}")
    if summary.baselines:
        lines += worth_of_ppo(summary.baselines)
    lines += _guards(summary.guards)
    lines.append(f"Reward model: {reward_model_in_words(summary.reward_model)}")
    parts = [name for name in summary.objective if name.startswith("rewards/")]
    changes = (
        f"{name.removeprefix('objective/')} {as_decimal(metric.first, 3)} -> "
        f"{as_decimal(metric.last, 3)}"
        for name in [*(parts if len(parts) > 1 else []), *SHOWN_METRICS]
        for metric in [summary.objective[name]]
    )
    lines.append(f"PPO: {', '.join(changes)}")
    divergence = (
        "KL not measured, because decoding is greedy or restricted"
        if kl is None
        else f"{as_decimal(kl, 2)} nats of KL"
    )
    lines.append(f"Answers: {divergence}, {summary.distinct['ppo']:.1%} distinct")
    lines.append(f"Cost: {cost_in_words(summary.cost)}")
    lines += [f"Note: {note}" for note in summary.notes]
    lines += [f"Inconclusive: {reason}" for reason in summary.reasons]
    lines += [f"Warning: {warning}" for warning in summary.warnings]
    return [*lines, *summary.promotion.reasons]


def cost_in_words(cost: RunCost) -> str:
    """Return the measured cost of a run in one line, even if the price is unknown."""
    cpu, judged = sum(step.cpu_seconds for step in cost.steps.values()), cost.judge_tokens
    parts = [
        f"{cost.gpu_hours:.2f} GPU hours, {cpu / 3600:.2f} CPU hours",
        f"{cost.tokens.sampled:,} tokens sampled and {cost.tokens.trained:,} trained by PPO",
        f"{cost.judge_calls:,} calls of judges with "
        f"{'an unknown number of' if judged is None else f'{judged:,}'} tokens",
    ]
    price = "price unknown: a GPU or judge has no price, or a server reports no tokens"
    if cost.price is not None:
        price = f"{cost.price:.2f} US dollars for GPUs and judges"
    return "; ".join([*parts, price])


def _improvement(difference: PairedDifference) -> str:
    points, interval = as_points(difference)
    return f"{points} against the references, 95 % interval {interval}"
