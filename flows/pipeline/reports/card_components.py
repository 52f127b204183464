"""Render a document as components of a Metaflow card.

Metaflow's Markdown component passes HTML and links to the browser, so the component gets only fixed
headings. Text from models and data sets is put into tables, value boxes, bars and charts, which
display the text literally.
"""

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from metaflow.cards import (
    Markdown,
    MetaflowCardComponent,
    ProgressBar,
    Table,
    ValueBox,
    VegaChart,
)

from pipeline.reports.charts import room_around, thinned
from pipeline.reports.document import (
    Chart,
    Curve,
    Document,
    Front,
    Interval,
    NamedRates,
    Reading,
    Section,
    ShownProgress,
)
from ppo_core.errors.redaction import mask_secrets

CHARTS_IN_ROW, CHARACTERS_IN_LINE = 2, 60
"""Charts in a row, and characters in a line of a chart's caption."""

CHART_WIDTH, CHART_HEIGHT = 390, 140
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
    parts = [
        Markdown(f"## {section.title}"),
        *(_bar(section.progress) if section.progress else []),
        *([Table([[sentence] for sentence in section.text])] if section.text else []),
        *([_charts(section.charts)] if section.charts else []),
    ]
    if section.rows or len(parts) == 1:
        parts.append(Table([list(row) for row in section.rows], headers=list(section.headers)))
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
    """Return prompts with their answers as a table.

    If all readings have the same answer titles, these are the headers; otherwise each answer has
    its title in its cell.
    """
    titles = [answer.title for answer in readings[0].answers]
    is_same = all([answer.title for answer in one.answers] == titles for one in readings)
    headers = titles if is_same else [""] * max(len(one.answers) for one in readings)
    rows = []
    for reading in readings:
        answers = [
            ("" if is_same else f"{answer.title}: ") + "".join(text for _, text in answer.pieces)
            for answer in reading.answers
        ]
        answers += [""] * (len(headers) - len(answers))
        rows.append([reading.title, reading.prompt, *answers, " ".join(reading.notes)])
    cells = [[mask_secrets(text) for text in row] for row in rows]
    return Table(cells, headers=["", "Prompt", *headers, ""])


def _charts(charts: Sequence[Chart]) -> Table:
    drawn = [VegaChart(_vega(one)) for one in charts]
    starts = range(0, len(drawn), CHARTS_IN_ROW)
    return Table([drawn[start : start + CHARTS_IN_ROW] for start in starts])


def _vega(chart: Chart) -> dict[str, Any]:
    """Return a chart as a specification of Vega-Lite."""
    height = CHART_HEIGHT
    match chart.data:
        case Curve():
            layers = _line_layers(chart.data)
        case NamedRates(rates=rates):
            layers, height = _rate_layers(rates), 30 * len(rates)
        case Front(points=points):
            layers, height = _front_layers(points), 2 * CHART_HEIGHT
    caption = wrap(chart.caption, CHARACTERS_IN_LINE)
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": chart.title, "subtitle": caption, "anchor": "start"},
        "width": CHART_WIDTH,
        "height": height,
        "layer": layers,
    }


def _line_layers(curve: Curve) -> list[dict[str, Any]]:
    points = thinned(curve.points)
    ends = [y for _, *ys in (*points, *curve.spread) for y in ys]
    # Without room around it, a flat line would have no area of healthy values.
    room = room_around(ends)
    lowest, highest = min(ends) - room, max(ends) + room
    # Limits far outside of the values would flatten the line, so the limits are clipped.
    low, high = (min(max(limit, lowest), highest) for limit in curve.healthy)
    layers = []
    if curve.healthy != (-math.inf, math.inf) and low < high:
        area = {"type": "rect", "color": "#d8f0e0"}
        layers.append(_layer(area, [{"low": low, "high": high}], y="low", y2="high"))
    if curve.spread:
        around = {"type": "area", "color": "#1f5f99", "opacity": 0.2}
        lows = thinned([(x, low) for x, low, _ in curve.spread])
        highs = thinned([(x, high) for x, _, high in curve.spread])
        kept = {x for x, _ in (*lows, *highs)}
        values = [{"x": x, "low": a, "high": b} for x, a, b in curve.spread if x in kept]
        layers.append(_layer(around, values, x="x", y="low", y2="high"))
    line = {"type": "line", "point": len(points) == 1}
    layers.append(_layer(line, [{"x": x, "y": y} for x, y in points], x="x", y="y"))
    if curve.marks:
        warned = {"type": "rule", "color": "#991b1b", "strokeDash": [4, 4]}
        layers.append(_layer(warned, [{"x": x} for x in curve.marks], x="x"))
    return layers


def _rate_layers(rates: Mapping[str, Interval]) -> list[dict[str, Any]]:
    values = [
        {"name": name, "rate": rate, "low": low, "high": high}
        for name, (rate, low, high) in rates.items()
    ]
    half = {"type": "rule", "strokeDash": [4, 4]}
    return [
        _layer(half, [{"rate": 0.5}], x="rate"),
        _layer({"type": "rule"}, values, x="low", x2="high", y="name"),
        _layer({"type": "point", "filled": True}, values, x="rate", y="name"),
    ]


def _front_layers(points: Mapping[str, tuple[float, Interval]]) -> list[dict[str, Any]]:
    values = [
        {"name": name, "x": x, "rate": rate, "low": low, "high": high}
        for name, (x, (rate, low, high)) in points.items()
    ]
    return [
        _layer({"type": "rule"}, values, x="x", y="low", y2="high"),
        _layer({"type": "point", "filled": True}, values, x="x", y="rate"),
        _layer({"type": "text", "align": "left", "dx": 6}, values, x="x", y="rate", text="name"),
    ]


def _layer(mark: dict[str, Any], values: list[dict[str, Any]], **fields: str) -> dict[str, Any]:
    """Return a layer that draws `values`; `fields` maps channels to fields of the values."""
    axis = {"type": "quantitative", "title": None, "scale": {"zero": False}}
    encoding: dict[str, Any] = {channel: {"field": field} for channel, field in fields.items()}
    for channel in {"x", "y"} & set(encoding):
        encoding[channel] |= axis
    if fields.get("y") == "name":
        # Without `sort`, the names would be in the order of the alphabet.
        encoding["y"] = {"field": "name", "type": "nominal", "title": None, "sort": None}
    return {"mark": mark, "data": {"values": values}, "encoding": encoding}
