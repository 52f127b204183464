"""Show texts of models and data sets as they are: on a terminal, and in Markdown."""

import re
import unicodedata

_MARKUP = str.maketrans(
    {c: f"\\{c}" for c in "*_[]"} | {c: f"&#{ord(c)};" for c in "\\`<>&|~$@"} | {"\n": "<br>"}
)
# A colon before a digit stays as it is: most of those stand in times, such as 10:30:00.
_EMOJI = re.compile(r":(?=[a-z+-][\w+-]*:)", re.IGNORECASE)
# A mail address begins at the beginning of a word: no text takes quadratic time.
_ADDRESS = re.compile(
    r"((?:(?:https?|ftp|dict)://|www\.)[^\s`|<>&$~\\]*|(?<![\w.+-])[\w.+-]+@[\w.-]+)",
    re.IGNORECASE,
)

# An underscore within a word is no markup.
_NOT_PLAIN = re.compile(r"[^\w ,./-]|(?<=www)\.|(?<![^\W_])_|_(?![^\W_])", re.IGNORECASE)


def printable(text: str) -> str:
    """Return the text without control characters, some of which move a terminal's cursor."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def as_markdown(text: str) -> str:
    """Return the text as a single line, escaped for a cell of a markdown table.

    Addresses become code. Most pages make links of bare addresses, some of them even of escaped
    ones; MLflow's also make links of `@names` and pictures of `:emojis:`.
    """
    parts = _ADDRESS.split(printable(text))
    return "".join(
        f"`{part}`" if number % 2 else _escaped(part) for number, part in enumerate(parts)
    )


def as_yaml(text: str) -> str:
    """Return the text as a string of YAML that is no markup either if it is shown as Markdown."""
    inert = _NOT_PLAIN.sub(lambda found: f"\\U{ord(found[0]):08x}", text)
    return f'"{inert}"'


def _escaped(text: str) -> str:
    return _EMOJI.sub("&#58;", text.translate(_MARKUP))
