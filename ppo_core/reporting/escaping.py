"""Escape texts of models and data sets, so that terminals and Markdown show them literally."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ppo_core.errors.control_characters import remove_controls

_MARKUP = str.maketrans(
    {c: f"\\{c}" for c in "*_[]"} | {c: f"&#{ord(c)};" for c in "\\`<>&|~$@"} | {"\n": "<br>"}
)
# A colon before a digit is not escaped, because most of these colons are in times (10:30:00).
_EMOJI = re.compile(r":(?=[a-z+-][\w+-]*:)", re.IGNORECASE)
# The lookbehind keeps the search for mail addresses from taking quadratic time.
_ADDRESS = re.compile(
    r"((?:(?:https?|ftp|dict)://|www\.)[^\s`|<>&$~\\]*|(?<![\w.+-])[\w.+-]+@[\w.-]+)",
    re.IGNORECASE,
)
# An underscore within a word is not markup.
_NOT_PLAIN = re.compile(r"[^\w ,./-]|(?<=www)\.|(?<![^\W_])_|_(?![^\W_])", re.IGNORECASE)


def one_line(text: str) -> str:
    """Return the text as one line, in which unprintable characters became spaces."""
    return "".join(character if character.isprintable() else " " for character in text)


def as_markdown(text: str) -> str:
    """Return the text as a single line, escaped for a cell of a Markdown table.

    Addresses become code, because most pages turn bare addresses into links, and some pages even
    turn escaped addresses into links. MLflow's pages also turn `@names` into links and `:emojis:`
    into pictures.
    """
    parts = _ADDRESS.split(remove_controls(text))
    return "".join(
        f"`{part}`" if number % 2 else _escaped(part) for number, part in enumerate(parts)
    )


def as_table(
    headers: Collection[str], rows: Iterable[Iterable[Any]], shown: Callable[[Any], str]
) -> str:
    """Return a Markdown table; `shown` turns a value into text, which is then escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(
        f"| {' | '.join(as_markdown(shown(value)) for value in line)} |" for line in lines
    )


def as_line(text: str) -> str:
    """Return the text as Markdown that is safe at a line start, where `#` or `1.` are markup."""
    shown = as_markdown(text).lstrip()
    if shown.startswith(tuple("#+-=0123456789")):
        return f"&#{ord(shown[0])};{shown[1:]}"
    return shown


def as_yaml(text: str) -> str:
    """Return the text as a YAML string without markup, for pages that show YAML as Markdown."""
    inert = _NOT_PLAIN.sub(lambda found: f"\\U{ord(found[0]):08x}", text)
    return f'"{inert}"'


def _escaped(text: str) -> str:
    return _EMOJI.sub("&#58;", text.translate(_MARKUP))
