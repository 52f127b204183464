"""Render a document as components of a Metaflow card.

Metaflow's Markdown component passes HTML and links to the browser, so it gets only fixed headings.
Text from models and data sets is put into tables, value boxes, bars, titles of charts and image
labels, which display the text literally.
"""

import math
from textwrap import wrap
from typing import Any

from metaflow.cards import (
    Image,
    Markdown,
    MetaflowCardComponent,
    ProgressBar,
    Table,
    ValueBox,
    VegaChart,
)

from pipeline.reports.charts import thinned
from pipeline.reports.document import Chart, Curve, Document, Reading, Section, ShownProgress
from ppo_core.errors.redaction import mask_secrets

CHARTS_IN_ROW, CHARACTERS_IN_LINE = 2, 60
"""Charts in a row, and characters in a line of a chart's caption."""

CHART_SIZE = {"width": 390, "height": 140}
"""Size of a chart in pixels. A chart in a table is invisible unless its width is set."""

MOST_IN_TITLE = 200
"""Maximum number of characters of a title in Metaflow."""


def card_components(document: Document) -> list[MetaflowCardComponent]:
    """Return a document as components of a Metaflow card."""
    return [
        ValueBox(
            title=document.subject[:MOST_IN_TITLE], value=document.verdict, theme=document.tone
        ),
        Table([[reason] for reason in document.reasons], headers=["Why"]),
        *(part for section in document.sections for part in _section(section)),
    ]


def _section(section: Section) -> list[MetaflowCardComponent]:
    curves = [one for one in section.charts if one.curve is not None]
    parts = [
        Markdown(f"## {section.title}"),
        *(_bar(section.progress) if section.progress else []),
        *([Table([[sentence] for sentence in section.text])] if section.text else []),
        *([_charts(curves)] if curves else []),
    ]
    if section.rows or len(parts) == 1:
        parts.append(Table([list(row) for row in section.rows], headers=list(section.headers)))
    parts += [Image(plot.png, plot.shows) for plot in section.plots]
    if section.commands:
        parts.append(Table([list(one) for one in section.commands], headers=["To", "Command"]))
    if section.readings:
        parts.append(_readings(section.readings))
    return [*parts, *(part for one in section.parts for part in _section(one))]


def _bar(progress: ShownProgress) -> list[MetaflowCardComponent]:
    done, total = math.floor(progress.done), math.ceil(progress.total)
    # The bar itself has no room for the details.
    bar = ProgressBar(max=total, value=done, label=progress.phase)
    return [bar, Table([[progress.details]])]


def _readings(readings: tuple[Reading, ...]) -> Table:
    """Return prompts with their answers as a table; each `Reading` has the same answer titles."""
    rows = [
        [
            reading.title,
            reading.prompt,
            *("".join(text for _, text in answer.pieces) for answer in reading.answers),
            " ".join(reading.notes),
        ]
        for reading in readings
    ]
    titles = [answer.title for answer in readings[0].answers]
    cells = [[mask_secrets(text) for text in row] for row in rows]
    return Table(cells, headers=["", "Prompt", *titles, ""])


def _charts(charts: list[Chart]) -> Table:
    drawn = [VegaChart(_vega(one, one.curve)) for one in charts if one.curve is not None]
    starts = range(0, len(drawn), CHARTS_IN_ROW)
    return Table([drawn[start : start + CHARTS_IN_ROW] for start in starts])


def _vega(chart: Chart, curve: Curve) -> dict[str, Any]:
    """Return a line chart as a specification of Vega-Lite."""
    points = thinned(curve.points)
    lowest, highest = min(y for _, y in points), max(y for _, y in points)
    # Limits far outside of the values would flatten the line, so they are clipped.
    low, high = (min(max(end, lowest), highest) for end in curve.healthy)
    y = {"type": "quantitative", "title": None, "scale": {"zero": False}}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "line", "point": len(points) == 1},
            "data": {"values": [{"x": x, "y": value} for x, value in points]},
            "encoding": {
                "x": {"field": "x", "type": "quantitative", "title": None},
                "y": {**y, "field": "y"},
            },
        }
    ]
    if curve.healthy != (-math.inf, math.inf) and low < high:
        area = {
            "mark": {"type": "rect", "color": "#d8f0e0"},
            "data": {"values": [{"low": low, "high": high}]},
            "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
        }
        layers.insert(0, area)
    if curve.marks:
        warned = {
            "mark": {"type": "rule", "color": "#991b1b", "strokeDash": [4, 4]},
            "data": {"values": [{"x": x} for x in curve.marks]},
            "encoding": {"x": {"field": "x", "type": "quantitative", "title": None}},
        }
        layers.append(warned)
    caption = wrap(chart.caption, CHARACTERS_IN_LINE)
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": chart.title, "subtitle": caption, "anchor": "start"},
        **CHART_SIZE,
        "layer": layers,
    }
