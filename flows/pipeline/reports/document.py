"""Structure of a report (text, tables and charts) before it is rendered as a card or a page."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.results.evaluation import (
    AnnotatorTest,
    ContestResult,
    GuardResult,
    PairedDifference,
    PeopleAndJudge,
    WinRate,
)
from pipeline.results.reward_report import OnPolicy, Probe, Rate, References
from pipeline.settings.gate_configs import BUILT_IN_GUARDS

Tone = Literal["success", "warning", "danger"]

PieceKind = Literal["same", "removed", "added"]
"""Which of two answers contain a piece of text: both (`same`), only the first (`removed`), or only
the second (`added`)."""

Pieces = tuple[tuple[PieceKind, str], ...]
"""A text, split where it differs from another text."""

MOST_EVIDENCE = 1_000_000
"""Evidence above which a report does not show the exact number."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The data of a line chart."""

    points: tuple[tuple[float, float], ...]
    """Points (x, y) from left to right, at least one; all values are finite."""

    healthy: tuple[float, float] = (-math.inf, math.inf)
    """Range of healthy values of y."""

    marks: tuple[float, ...] = ()
    """Values of x with a warning."""

    spread: tuple[tuple[float, float, float], ...] = ()
    """Points (x, low, high) of an area around the line, from left to right; values are finite."""


Interval = tuple[float, float, float]
"""A rate, and the lower and the upper end of its interval."""


@dataclass(frozen=True, kw_only=True)
class NamedRates:
    """The data of a chart of rates between 0 and 1, one below the other."""

    rates: Mapping[str, Interval]
    """Name, which may be untrusted text -> rate with its interval."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """The data of a chart of named rates (y axis) by a value such as a divergence (x axis)."""

    points: Mapping[str, tuple[float, Interval]]
    """Name -> value on the x axis, and rate with its interval."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart; an HTML page draws it as SVG, and a card by Vega-Lite."""

    title: str
    """Heading. `title` and `caption` may contain untrusted text."""

    caption: str
    """What the chart shows, also for readers who cannot see it."""

    data: Curve | NamedRates | Front


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to a prompt."""

    title: str
    """Who gave the answer, or at which time of the training."""

    pieces: Pieces
    """The text; one piece if nothing is compared."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A prompt and its answers, for a person to read. All texts are untrusted."""

    title: str
    prompt: str

    answers: tuple[Answer, ...]
    """Answers, which a page shows side by side."""

    notes: tuple[str, ...] = ()
    """Sentences below the answers, such as verdicts or scores."""


@dataclass(frozen=True, kw_only=True)
class ShownProgress:
    """Progress of a phase that has not ended. All texts are untrusted."""

    phase: str
    done: float
    total: float

    details: str
    """The count, the rate, and the time left."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report. Only the title is required."""

    title: str
    """Heading, which never contains text of a model or a data set."""

    headers: tuple[str, ...] = ()
    """Names of the columns, which never contain text of a model or a data set."""

    rows: tuple[tuple[str, ...], ...] = ()
    """Table cells as plain text. Cells may contain untrusted text, so a renderer must escape it."""

    text: tuple[str, ...] = ()
    """Sentences above the table, which may contain untrusted text."""

    charts: tuple[Chart, ...] = ()
    """Charts above the table."""

    commands: tuple[tuple[str, str], ...] = ()
    """Tasks of the reader, each with the command for it."""

    readings: tuple[Reading, ...] = ()

    progress: ShownProgress | None = None
    """A progress bar above all other parts of the section."""

    parts: tuple["Section", ...] = ()
    """Sections within this section."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report."""

    subject: str
    """Question that the verdict answers; never contains untrusted text."""

    verdict: str
    """Verdict of the report; never contains untrusted text."""

    tone: Tone
    """Tone of the verdict, which a renderer shows as a color."""

    reasons: tuple[str, ...]
    """Reasons for the verdict. They may contain untrusted text, so a renderer must escape them."""

    sections: tuple[Section, ...]
    """Sections with the measurements."""

    refresh: int = 0
    """Seconds after which a page reloads itself; 0 for never."""


def as_percent(share: float | None) -> str:
    """Return a fraction as text, such as `64.7%`; None becomes `none`."""
    return "none" if share is None else f"{share:.1%}"


def as_interval(of: WinRate | Rate | Probe | References | OnPolicy | PeopleAndJudge) -> str:
    """Return the interval from `low` to `high` as text, in percent."""
    return f"{of.low:.1%} .. {of.high:.1%}"


def as_evidence(rate: WinRate) -> str:
    """Return the evidence for a candidate and the numbers of pairs; "none" without a test."""
    if rate.test is None:
        return "none"
    evidence = rate.test.evidence
    number = f"{evidence:,.0f}" if evidence >= 10 else f"{evidence:.2g}"
    if evidence >= MOST_EVIDENCE:
        number = f"over {MOST_EVIDENCE:,}"
    return f"{number} : 1 after {rate.test.asked} of {rate.test.available} pairs"


def as_points(of: PairedDifference | GuardResult) -> tuple[str, str]:
    """Return a difference of rates as text, such as `+40.3 points`, and its interval as text."""
    difference, low, high = (f"{100 * end:+z.1f}" for end in (of.difference, of.low, of.high))
    return f"{difference} points", f"{low} .. {high}"


def as_margin(guard: GuardResult) -> str:
    """Return the margin of a guard as text, such as `5 points`."""
    return f"{100 * guard.margin:g} points"


def guard_title(name: str) -> str:
    """Return the name of a guard; for a built-in guard, also which answers it counts."""
    return f"{name}: answers that {BUILT_IN_GUARDS[name]}" if name in BUILT_IN_GUARDS else name


GUARD_COLUMNS = ("policy", "rival", "difference", "95 % interval, points", "margin", "")
"""Headers of the cells that `guard_cells` returns."""


def guard_cells(guard: GuardResult) -> tuple[str, ...]:
    """Return the result of a guard as one text for each of GUARD_COLUMNS."""
    return (
        as_percent(guard.policy),
        as_percent(guard.rival),
        *as_points(guard),
        as_margin(guard),
        "passed" if guard.passed else "refused",
    )


def describe_annotator_test(test: AnnotatorTest) -> str:
    """Return a sentence on whether the judge may replace a person."""
    if test.winning_rate is None:
        return f"Whether the judge may stand for a person was not measured: {test.why}"
    count = sum(one.replaceable for one in test.people.values())
    return (
        f"The judge {'may' if test.passed else 'may not'} stand for a person: it can replace "
        f"{count} of {len(test.people)} people (alternative annotator test, cost {test.cost:g})."
    )


def as_equal_length_rate(contest: ContestResult) -> str:
    """Return the win rate at equal length as text, or say that it cannot be measured."""
    if contest.length_controlled is None:
        return f"not measurable, {contest.equal_length_pairs} of {contest.n}"
    return as_percent(contest.length_controlled)


def as_number(value: float | None) -> str:
    """Return a number as text with three significant digits; None becomes `none`."""
    return "none" if value is None else f"{value:z.3g}"


def as_decimal(value: float, digits: int) -> str:
    """Return a number with a fixed number of decimals; a number that rounds to zero becomes `0`."""
    text = f"{value:z.{digits}f}"
    return text if float(text) else "0"
