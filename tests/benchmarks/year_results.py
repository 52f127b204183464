"""The weeks of a simulated year, as a table and as a figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from tests.benchmarks.tables import make_table


@dataclass(frozen=True, kw_only=True)
class Week:
    """What a week left behind."""

    number: int

    event: str
    """What was not like in other weeks; empty if nothing was."""

    outcome: str
    """How the run of the flow ended, such as "promoted 3"."""

    champion: str
    """Version of the champion at the end of the week."""

    won: float
    """True win rate of the champion against SFT, on prompts as users give them in this week."""

    liked: float
    """Share of the champion's answers that users like, on the same prompts."""

    shares: tuple[float, ...]
    """Share of each topic in the prompts."""

    labels: int
    """Number of labeled pairs so far."""

    judged: int
    """Number of questions to the judge so far."""

    seconds: float


def print_year(weeks: Sequence[Week]) -> None:
    """Print a row for each week, and the largest loss from one week to the next."""
    names = "week|event|outcome|champion|true win rate|liked|labels|judged|seconds"
    table = make_table("A year of weekly retraining", names)
    for week in weeks:
        table.add_row(
            *(str(week.number), week.event, week.outcome, week.champion),
            *(f"{100 * week.won:.1f} %", f"{100 * week.liked:.1f} %"),
            *(f"{week.labels:,}", f"{week.judged:,}", f"{week.seconds:.0f}"),
        )
    Console(width=140).print(table)
    lost, where = max(
        ((one.won - two.won, two.number) for one, two in pairwise(weeks)), default=(0.0, 1)
    )
    promoted, withdrawn = (
        sum(word in week.outcome for week in weeks) for word in ("promoted", "withdrawn")
    )
    print(
        f"{promoted} of {len(weeks)} weeks promoted a policy, and {withdrawn} withdrew one. At the "
        f"end the champion wins {100 * weeks[-1].won:.1f} % against SFT. The largest loss from one "
        f"week to the next is {100 * max(lost, 0.0):.1f} points, in week {where}."
    )


def draw_year(weeks: Sequence[Week], file: Path) -> None:
    """Draw the champion's true win rate, what it cost, and the decisions, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    numbers = [week.number for week in weeks]
    top.step(numbers, [100 * week.won for week in weeks], where="mid", color="C0")
    for word, marker, color in (
        ("promoted", "^", "C2"),
        ("refused", "v", "C7"),
        ("withdrawn", "s", "C3"),
        ("failed", "x", "C3"),
    ):
        found = [week for week in weeks if word in week.outcome]
        heights = [100 * week.won for week in found]
        top.plot([week.number for week in found], heights, marker, color=color, label=word)
    for week in weeks:
        if week.event:
            top.axvline(week.number, color="C3", linestyle=":")
            top.text(week.number, 0.02, f" {week.event}", transform=top.get_xaxis_transform())
    top.set_ylabel("champion's true win rate\nagainst SFT, %")
    top.legend(loc="lower right")
    bottom.plot(numbers, [week.labels for week in weeks], color="C1")
    bottom.set_ylabel("labeled pairs", color="C1")
    bottom.set_xlabel("week")
    judged = bottom.twinx()
    judged.plot(numbers, [week.judged for week in weeks], color="C4")
    judged.set_ylabel("questions to the judge", color="C4")
    figure.savefig(file, dpi=100)
