"""A report before it is a card or a page: text, tables and figures in their order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Tone = Literal["success", "warning", "danger"]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure of a report."""

    png: bytes
    """The file."""

    shows: str
    """What a person would see, for one who cannot; our own words."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One subject of a report: a table, figures, or both."""

    title: str
    """What it is about: our own words, never a model's or a data set's."""

    headers: tuple[str, ...] = ()
    """Names of the columns; our own words."""

    rows: tuple[tuple[str, ...], ...] = ()
    """Cells, as they are read. They may quote anybody: whoever renders them escapes them."""

    plots: tuple[Plot, ...] = ()
    """Figures beneath the table."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A report as a person reads it."""

    subject: str
    """What the verdict is about: our own words."""

    verdict: str
    """The verdict: our own words."""

    tone: Tone
    """How the verdict is coloured."""

    reasons: tuple[str, ...]
    """Sentences that say why. They may quote anybody, like the cells of a table."""

    sections: tuple[Section, ...]
    """What was measured."""


def as_percent(share: float | None) -> str:
    """A share as 64.7%, or `none`."""
    return "none" if share is None else f"{share:.1%}"


def as_interval(of: Mapping[str, Any]) -> str:
    """The interval of a share from `low` to `high`."""
    return f"{of['low']:.1%} .. {of['high']:.1%}"


def as_number(value: float | None) -> str:
    """Three significant digits, or `none`."""
    return "none" if value is None else f"{value:.3g}"
