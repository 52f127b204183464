"""Decisions as lines of JSON and as rows of a table."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.registry.decisions import CUT_MARK, Decision, as_markdown, decode, encode, plain
from ppo_core.errors import ConfigError

FIRST = Decision(
    number=1,
    action="promoted",
    version=4,
    champion=4,
    reasons=("It won 61 % of 400.", "Its answers are no longer."),
    by="run RLHF/123",
    at="2026-11-21T12:00:00+00:00",
    key="RLHF/123",
)


def test_a_version_is_promoted_if_it_is_the_champion_after_the_decision():
    champions = (4, 3, None)
    assert [replace(FIRST, champion=one).is_promoted for one in champions] == [True, False, False]


texts = st.text(max_size=400).map(plain)
decisions = st.builds(
    Decision,
    number=st.integers(1, 20000),
    action=st.sampled_from(["promoted", "refused", "rolled back", "found"]),
    version=st.integers(1, 10**6),
    champion=st.none() | st.integers(1, 10**6),
    reasons=st.lists(texts, max_size=12).map(tuple),
    by=st.text(max_size=100).map(plain),
    at=st.just("2026-11-21T12:00:00+00:00"),
    key=st.text(max_size=100).map(plain),
)


@given(decisions)
def test_a_decision_is_what_it_was_after_writing_and_reading(decision: Decision):
    assert decode(decision.number, encode(decision)) == decision


@given(decisions, st.lists(texts, min_size=1))
def test_a_decision_that_is_too_long_loses_the_end_of_its_reasons_only(
    decision: Decision, more: list[str]
):
    reasons = [*decision.reasons, *(reason * 20 for reason in more), "x" * 7000]
    line = encode(replace(decision, reasons=tuple(reasons)))
    read = decode(decision.number, line)
    assert 5000 < len(line) <= 6000
    assert read.reasons[-1].endswith(CUT_MARK)
    assert "\n".join(reasons).startswith("\n".join(read.reasons).removesuffix(CUT_MARK))
    assert replace(read, reasons=()) == replace(decision, reasons=())


@given(st.lists(decisions, max_size=60), st.text())
def test_the_table_fits_a_tag_and_nothing_in_it_is_markup(made: list[Decision], text: str):
    table = as_markdown([replace(each, by=text[:250]) for each in made])
    assert len(table) <= 8000
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert all(row.count("|") == 8 for row in rows)
    assert not set("`*_[]<>@") & set(re.sub(r"`[^`]*`|\\.", "", "".join(rows)))
    left = len(made) - len(rows)
    assert not left or f"{made[left - 1].number} older decisions" in table


@given(st.text())
def test_plain_text_is_one_line_that_json_and_utf_8_can_hold(text: str):
    line = plain(text + "\x00\x1b[31m\ud800\n")
    assert line.isprintable()
    assert json.loads(json.dumps(line)).encode().decode() == line


@pytest.mark.parametrize("name_of_field", ["by", "key"])
def test_a_name_that_leaves_no_room_for_reasons_is_refused(name_of_field: str):
    with pytest.raises(ConfigError, match=f"{name_of_field}='xxx.* has 251 characters"):
        replace(FIRST, **{name_of_field: "x" * 251})
