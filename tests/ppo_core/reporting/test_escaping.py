"""Texts of others in Markdown: they stay in their place, and say what they said."""

import re

import pytest
import yaml

from ppo_core.reporting.escaping import as_line, as_markdown, as_yaml


def test_a_text_in_markdown_stays_on_its_line_and_in_its_cell():
    assert as_markdown("a|b\nc\x1b") == "a&#124;b<br>c"
    assert as_markdown(r"\*<b>&") == r"&#92;\*&#60;b&#62;&#38;"
    assert as_markdown("plain words, 1 + 1 = 2.") == "plain words, 1 + 1 = 2."


@pytest.mark.parametrize("text", ["# x", "  # x", "\t1. x", "    + x", "x"])
def test_a_line_begins_with_no_markup(text: str):
    assert re.match("&#[0-9]+;|x", as_line(text))


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("<a href=http://192.0.2.1/x>", "&#60;a href=`http://192.0.2.1/x`&#62;"),
        ("WWW.example.org|FTP://x", "`WWW.example.org`&#124;`FTP://x`"),
        (r"\`me@example.org`", "&#92;&#96;`me@example.org`&#96;"),
        ("thanks @ada", "thanks &#64;ada"),
        (":smile::+1:", "&#58;smile:&#58;+1:"),
        ("T10:00:00+00:00", "T10:00:00+00:00"),
        ("python:judge.py:judge", "python:judge.py:judge"),
        ("at 12:30: [x](javascript:y)", r"at 12:30: \[x\](javascript:y)"),
    ],
)
def test_an_address_a_name_or_an_emoji_becomes_no_link_and_no_picture(text: str, escaped: str):
    assert as_markdown(text) == escaped


@pytest.mark.parametrize(
    "text", ["<b>*x*</b> [y](z) _a_ `c`", "www.x.org me@x.org", "a: \n'\"\\", "\U0001f600é"]
)
def test_a_text_in_yaml_is_itself_and_has_no_markup(text: str):
    written = as_yaml(text)
    assert yaml.safe_load(f"name: {written}") == {"name": text}
    assert not re.search(r"[<>*\[\]`@:]|www\.|\b_|_\b", written)
    assert as_yaml("org/rlhf_policy-2.5, version 7") == '"org/rlhf_policy-2.5, version 7"'


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["a", "a.", "@", "a@", "http://", "www.", ":a", "_"])
def test_no_text_takes_long(unit: str):
    text = unit * (300_000 // len(unit))
    as_markdown(text)
    as_yaml(text)
