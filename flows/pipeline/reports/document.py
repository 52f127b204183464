"""A report as text, tables and figures, before it is rendered as a card or a page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Tone = Literal["success", "warning", "danger"]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure of a report."""

    png: bytes
    """Contents of the PNG file."""

    shows: str
    """Alternative text; our own words."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One subject of a report: a table, figures, or both."""

    title: str
    """Heading: our own words, never text of a model or a data set."""

    headers: tuple[str, ...] = ()
    """Names of the columns; our own words."""

    rows: tuple[tuple[str, ...], ...] = ()
    """Cells as plain text. They may quote anybody, so a renderer must escape them."""

    plots: tuple[Plot, ...] = ()
    """Figures below the table."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report."""

    subject: str
    """What the verdict is about: our own words."""

    verdict: str
    """The verdict: our own words."""

    tone: Tone
    """Color of the verdict."""

    reasons: tuple[str, ...]
    """Sentences that say why. They may quote anybody, so a renderer must escape them."""

    sections: tuple[Section, ...]
    """The measurements."""


def as_percent(share: float | None) -> str:
    """Return a share as 64.7%, or `none`."""
    return "none" if share is None else f"{share:.1%}"


def as_interval(of: Mapping[str, Any]) -> str:
    """Return the interval of a share from `low` to `high`."""
    return f"{of['low']:.1%} .. {of['high']:.1%}"


def as_number(value: float | None) -> str:
    """Return a number with three significant digits, or `none`."""
    return "none" if value is None else f"{value:.3g}"
