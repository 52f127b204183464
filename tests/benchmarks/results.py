"""RESULTS.md: a summary, generated tables, and a part below them that is written by hand."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

KEPT = "## What was tried and did not pay"
"""Heading of the part that is written by hand."""

FIGURE = "../../docs/images/speed.png"
"""The figure of the summary, relative to RESULTS.md."""

SUMMARY = """How many times as fast as TRL 1.12 this project is, on the machine below, with the
default settings of each; "memory" is our peak memory divided by TRL's. Each ratio is the median of
pairs that were measured in turns, with the lowest and the highest. "The whole job" is `rlhf.py run`
against TRL's trainers of SFT, reward model and PPO, one after another. Only `rlhf.py run` also
validates the reward model, measures the win rate and registers the policy."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A ratio to TRL for the summary."""

    what: str
    model: str
    ratios: Sequence[float]
    """How many times as fast as TRL, pair by pair."""

    memory: float | None = None
    """Our peak memory over TRL's; None if it was not measured."""


def as_markdown(table: Table) -> str:
    """Return a table of rich as Markdown, with its title as a heading."""
    title, table.title = table.title, None
    shown, table.box = table.box, box.MARKDOWN
    text = StringIO()
    Console(file=text, width=400).print(table)
    table.title, table.box = title, shown
    lines = [line.rstrip() for line in text.getvalue().strip().splitlines()]
    return "\n".join([f"### {title}", "", *lines, ""])


def write_results(
    path: Path, machine: Sequence[str], headlines: Sequence[Headline], tables: Sequence[Table]
) -> None:
    """Write summary, figure, machine and tables; keep the text after the heading `KEPT`."""
    kept = ""
    if path.exists():
        _, _, kept = path.read_text().partition(KEPT)
    about = f'Written by `make bench`, down to the section "{KEPT.removeprefix("## ")}".'
    facts = "\n".join(f"- {line}" for line in machine)
    measured = "\n".join(as_markdown(table) for table in tables)
    summary = f"{SUMMARY}\n\n{summary_table(headlines)}\n\n![The ratios of the table]({FIGURE})"
    parts = ["# Results", about, summary, "## Machine", facts, "## Measured", measured]
    path.write_text("\n\n".join(parts) + f"\n{KEPT}{kept or chr(10)}")
    draw_headlines(headlines, path.parent / FIGURE)


def summary_table(headlines: Sequence[Headline]) -> str:
    """Return the table of the headlines in Markdown."""
    lines = ["| what | model | times as fast as TRL | memory |", "|---|---|---|---|"]
    for one in headlines:
        low, high = min(one.ratios), max(one.ratios)
        memory = "" if one.memory is None else f"{one.memory:.2f}"
        ratio = f"{statistics.median(one.ratios):.2f} ({low:.2f} .. {high:.2f})"
        lines.append(f"| {one.what} | {one.model} | {ratio} | {memory} |")
    return "\n".join(lines)


def draw_headlines(headlines: Sequence[Headline], file: Path) -> None:
    """Draw a bar for each headline, with its spread, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.3 * len(headlines)), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(reversed(headlines)):
        ratio = statistics.median(one.ratios)
        spread = [[ratio - min(one.ratios)], [max(one.ratios) - ratio]]
        axes.barh(place, ratio, xerr=spread, color="C0", ecolor="C7")
    names = [f"{one.what}, {one.model}" for one in reversed(headlines)]
    axes.set_yticks(range(len(names)), names)
    axes.axvline(1, color="C3", linestyle=":")
    axes.set_xlabel("times as fast as TRL 1.12, default settings of each")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
