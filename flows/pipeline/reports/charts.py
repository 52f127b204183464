"""Draw charts as inline SVG that takes its colors from the page and needs no script."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pipeline.reports.document import Chart, Curve, Front, Interval, NamedRates, as_number
from ppo_core.errors.redaction import mask_secrets

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 360, 46, 10, 14, 20
"""Width of a chart, and sizes of its margins. One unit is about one pixel on a phone."""

MOST_POINTS = 500
"""Maximum number of points of a line, see `thinned`."""

Point = tuple[float, float]


@dataclass(frozen=True)
class ChartAxis:
    """Maps values between `low` and `high` to positions between `start` and `end` in a chart."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the position of a value; a value outside of the axis is clipped."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def draw_chart(chart: Chart) -> Markup:
    """Return a chart as an SVG element; all text in it is escaped, and secrets are masked."""
    shows = mask_secrets(f"{chart.title}. {chart.caption}")
    match chart.data:
        case Curve():
            return _line_chart(chart.data, shows)
        case NamedRates():
            return _interval_chart(chart.data.rates, shows)
        case Front():
            return _front_chart(chart.data.points, shows)


def _line_chart(curve: Curve, shows: str) -> Markup:
    """Draw a line and its spread, the range of healthy values, and marks at some values of x."""
    points = thinned(curve.points)
    lows = thinned([(x, low) for x, low, _ in curve.spread])
    highs = thinned([(x, high) for x, _, high in curve.spread])
    height, ys = 150, [y for _, y in [*points, *lows, *highs]]
    room = room_around(ys)
    x = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT)
    y = ChartAxis(min(ys) - room, max(ys) + room, height - BOTTOM, TOP)

    def path(line: Iterable[Point]) -> str:
        return " ".join(f"{x(a)},{y(b)}" for a, b in line)

    spread = Markup('<polygon class="spread" points="{}"/>').format(path([*lows, *reversed(highs)]))
    parts = [
        _area(y, curve.healthy),
        *([spread] if curve.spread else []),
        _grid(x, (points[0][0], points[-1][0]), y, (min(ys), max(ys)), height),
        *(_mark(x(at), height) for at in curve.marks),
        Markup('<polyline class="line" points="{}"/>').format(path(points)),
        # The last point is also a dot, because a line of one point is invisible.
        Markup('<circle class="dot" cx="{}" cy="{}" r="2.5"/>').format(
            x(points[-1][0]), y(points[-1][1])
        ),
    ]
    return _svg(parts, height, shows)


def _interval_chart(rates: Mapping[str, Interval], shows: str) -> Markup:
    """Draw rates between 0 and 1 with their intervals, one below the other, and a line at 50 %."""
    height, x, parts = 20 + 40 * len(rates), ChartAxis(0, 1, 12, WIDTH - 12), []
    for number, (name, (rate, low, high)) in enumerate(rates.items()):
        top = 40 * number
        parts += [
            Markup('<text x="12" y="{}">{}: {:.1%}</text>').format(
                top + 14, mask_secrets(name), rate
            ),
            Markup('<line class="half" x1="{x}" x2="{x}" y1="{}" y2="{}"/>').format(
                top + 18, top + 34, x=x(0.5)
            ),
            Markup('<line class="line" x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(
                x(low), x(high), y=top + 26
            ),
            Markup('<circle class="dot" cx="{}" cy="{}" r="4"/>').format(x(rate), top + 26),
        ]
    parts += [
        Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            x(share), height - 4, f"{share:.0%}"
        )
        for share in (0.25, 0.5, 0.75)
    ]
    return _svg(parts, height, shows)


def _front_chart(points: Mapping[str, tuple[float, Interval]], shows: str) -> Markup:
    """Draw named rates with their intervals (y axis) by a value such as a divergence (x axis)."""
    height = 240
    x = ChartAxis(0, 1.05 * max(0.01, *(value for value, _ in points.values())), LEFT, WIDTH - 20)
    y = ChartAxis(0, 1, height - BOTTOM, TOP)
    parts = [_grid(x, (0, x.high), y, (0, 0.5, 1), height)]
    in_order = sorted(points.items(), key=lambda one: one[1][0])
    for number, (name, (value, (rate, low, high))) in enumerate(in_order):
        # Names are above and below the intervals in turn, so that neighbors do not overlap.
        at = y(low) + 13 if number % 2 else y(high) - 6
        anchor = "end" if x(value) > WIDTH - 60 else "start" if x(value) < LEFT + 30 else "middle"
        parts += [
            Markup('<line class="line" x1="{x}" x2="{x}" y1="{}" y2="{}"/>').format(
                y(low), y(high), x=x(value)
            ),
            Markup('<circle class="dot" cx="{}" cy="{}" r="4"/>').format(x(value), y(rate)),
            Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(
                x(value), at, anchor, mask_secrets(name)
            ),
        ]
    return _svg(parts, height, shows)


def room_around(values: Sequence[float]) -> float:
    """Return the room below and above the values on a vertical axis."""
    return 0.06 * (max(values) - min(values)) or 0.06 * abs(values[0]) or 1.0


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST_POINTS points: both ends, and the extremes in each part of the line."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil((len(points) - 2) / (MOST_POINTS // 2 - 1))
    parts = (points[start : start + size] for start in range(1, len(points) - 1, size))
    extremes = [
        point
        for part in parts
        for point in sorted({min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])})
    ]
    return [points[0], *extremes, points[-1]]


def _axis(values: Sequence[float], start: float, end: float) -> ChartAxis:
    low, high = min(values), max(values)
    return ChartAxis(low, high if high > low else low + 1, start, end)


def _area(y: ChartAxis, healthy: tuple[float, float]) -> Markup:
    low, high = healthy
    if (low == -math.inf and high == math.inf) or low > y.high or high < y.low:
        return Markup("")
    top, bottom = y(high), y(low)
    return Markup('<rect class="healthy" x="{}" y="{}" width="{}" height="{}"/>').format(
        LEFT, top, WIDTH - LEFT - RIGHT, round(bottom - top, 1)
    )


def _grid(
    x: ChartAxis, columns: Sequence[float], y: ChartAxis, rows: Sequence[float], height: int
) -> Markup:
    lines = Markup("")
    for row in dict.fromkeys(rows):
        # A value that is tiny on the scale of this chart is a rounding error of 0.
        shown = as_number(row if abs(row) > 1e-3 * (y.high - y.low) else 0.0)
        lines += Markup(
            '<line class="grid" x1="{}" x2="{}" y1="{y}" y2="{y}"/>'
            '<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>'
        ).format(LEFT, WIDTH - RIGHT, LEFT - 5, y(row) + 4, shown, y=y(row))
    return lines + Markup("").join(
        Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>').format(
            x(column), height - 5, anchor, _tick(column)
        )
        for column, anchor in zip(columns, ("start", "end"), strict=True)
    )


def _tick(value: float) -> str:
    """Return a number below the x axis; the number of an update keeps all its digits."""
    return f"{value:,.0f}" if float(value).is_integer() else as_number(value)


def _mark(at: float, height: int) -> Markup:
    return Markup(
        '<line class="warned" x1="{0}" x2="{0}" y1="12" y2="{1}"/>'
        '<text x="{0}" y="10" text-anchor="middle">!</text>'
    ).format(at, height - BOTTOM)


def _svg(parts: Iterable[Markup], height: int, shows: str) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, shows, Markup("").join(parts)
    )
