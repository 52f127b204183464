"""The charts of reports: what is drawn, and where."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from pipeline.reports.card_components import _line_layers
from pipeline.reports.charts import MOST_POINTS, draw_chart
from pipeline.reports.document import Chart, Curve, Front, NamedRates, Section
from pipeline.reports.evaluation_report import without_ppo_section
from pipeline.reports.reward_model_report import reward_sections
from tests.helpers.inputs.sample_reports import (
    HOSTILE,
    changed,
    evaluation_result,
    reward_report,
)


def drawn(data: Curve | NamedRates | Front) -> ElementTree.Element:
    chart = Chart(title=f"title {HOSTILE}", caption="caption", data=data)
    return ElementTree.fromstring(draw_chart(chart))


def dots(svg: ElementTree.Element) -> list[tuple[float, float]]:
    found = (one for one in svg.iter("circle") if one.get("class") == "dot")
    return [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in found]


def lengths(svg: ElementTree.Element, axis: str) -> list[float]:
    found = (one for one in svg.iter("line") if one.get("class") == "line")
    return [abs(float(one.get(f"{axis}2", "")) - float(one.get(f"{axis}1", ""))) for one in found]


def test_rates_are_drawn_evenly_with_intervals_as_wide_as_they_are():
    rates = {"a": (0.0, 0.0, 0.2), HOSTILE: (0.5, 0.2, 0.8), "c": (1.0, 0.8, 1.0)}
    svg = drawn(NamedRates(rates=rates))
    (zero, _), (half, _), (whole, _) = dots(svg)
    assert half - zero == pytest.approx(whole - half)
    narrow, wide, _ = lengths(svg, "x")
    assert wide == pytest.approx(3 * narrow, rel=0.01)
    names = [one.text for one in svg.iter("text") if one.get("class") != "tick"]
    assert names == ["a: 0.0%", f"{HOSTILE}: 50.0%", "c: 100.0%"]
    assert svg.get("aria-label") == f"title {HOSTILE}. caption"


def test_a_front_is_drawn_by_value_and_rate():
    points = {"a": (1.0, (0.2, 0.1, 0.3)), "b": (2.0, (0.4, 0.2, 0.6)), "c": (4.0, (0.8, 0.8, 0.8))}
    svg = drawn(Front(points=points))
    (x0, y0), (x1, y1), (x2, y2) = dots(svg)
    assert x2 - x1 == pytest.approx(2 * (x1 - x0), abs=0.2)
    assert y1 - y2 == pytest.approx(2 * (y0 - y1), abs=0.2)
    assert lengths(svg, "y")[1] == pytest.approx(2 * lengths(svg, "y")[0], rel=0.01)


def test_a_line_has_its_points_and_its_range():
    svg = drawn(
        Curve(points=((0.0, 0.0), (1.0, 4.0), (4.0, 1.0)), healthy=(1.0, 3.0), marks=(1.0,))
    )
    (line,) = svg.iter("polyline")
    places = [tuple(map(float, one.split(","))) for one in line.get("points", "").split()]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x2 - x0 == pytest.approx(4 * (x1 - x0), abs=0.3)
    assert y0 - y1 == pytest.approx(4 * (y0 - y2), abs=0.5)
    (area,) = svg.iter("rect")
    assert float(area.get("height", "")) == pytest.approx((y0 - y1) / 2, abs=0.3)
    (mark,) = (one for one in svg.iter("line") if one.get("class") == "warned")
    assert float(mark.get("x1", "")) == x1
    assert not list(svg.iter("polygon"))


def test_the_spread_of_a_line_is_an_area_around_it_that_fits_in_the_chart():
    around = ((0.0, -3.0, 1.0), (1.0, 2.0, 9.0))
    svg = drawn(Curve(points=((0.0, 0.0), (1.0, 4.0)), spread=around))
    (area,) = svg.iter("polygon")
    corners = [tuple(map(float, one.split(","))) for one in area.get("points", "").split()]
    (x0, low0), (x1, low1), (x2, high1), (x3, high0) = corners
    assert (x0, x1) == (x3, x2)
    # Heights are 4, 7 and 12 units of the same axis.
    assert low0 - high0 == pytest.approx(4 / 12 * (low0 - high1), abs=0.2)
    assert low1 - high1 == pytest.approx(7 / 12 * (low0 - high1), abs=0.2)
    assert 0 < high1 < low0 < 150


def test_a_card_keeps_the_ends_and_the_extremes_of_a_long_spread():
    spread = [(float(x), 0.0, 1.0) for x in range(1000)]
    spread[501] = (501.0, -9.0, 7.0)
    curve = Curve(points=tuple((x, 0.5) for x, _, _ in spread), spread=tuple(spread))
    (area,) = (one for one in _line_layers(curve) if one["mark"]["type"] == "area")
    values = area["data"]["values"]
    assert (values[0]["x"], values[-1]["x"]) == (0.0, 999.0)
    assert {"x": 501.0, "low": -9.0, "high": 7.0} in values
    assert len(values) <= 2 * MOST_POINTS


def test_a_card_shows_the_healthy_values_around_a_flat_line():
    curve = Curve(points=((0.0, 2.0), (1.0, 2.0)), healthy=(0.0, 5.0))
    assert [one["mark"]["type"] for one in _line_layers(curve)] == ["rect", "line"]


def charts_of(sections: list[Section]) -> dict[str, Chart]:
    return {chart.title: chart for section in sections for chart in section.charts}


def test_the_samples_of_a_reward_model_are_drawn_as_they_were_counted():
    samples = replace(
        reward_report().samples,
        counts=[1, 2, 3],
        edges=[0.0, 1.0, 2.0, 3.0],
        best_of={"1": 1.0, "4": 2.5},
    )
    charts = charts_of(reward_sections(replace(reward_report(), samples=samples)))
    assert charts["Samples by score"].data == Curve(points=((0.5, 1), (1.5, 2), (2.5, 3)))
    assert charts["Best of k samples"].data == Curve(points=((1, 1.0), (4, 2.5)))


def test_a_front_needs_the_rate_and_the_divergence_of_ppo():
    evaluation = evaluation_result()
    (chart,) = without_ppo_section(evaluation).charts
    assert isinstance(chart.data, Front)
    assert chart.data.points["SFT"] == (0.0, (0.5, 0.5, 0.5))
    assert evaluation.baselines is not None
    assert chart.data.points["PPO"][0] == evaluation.kl["ppo"]
    for changes in ({"kl": {"sft": 0.0, "ppo": None}}, {"baselines": None}):
        assert without_ppo_section(changed(evaluation, changes)).charts == ()
