"""Escape control characters, so that no text of a file or a server can control the terminal.

Control characters move the cursor, delete lines, set the title, or make the terminal send a reply.
Characters of text direction change the order in which a text is shown.
"""

import re

# All control characters except line break and tab. The last three ranges are the characters that
# change the direction of text (two ranges), and surrogates, which no stream can write.
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
_ANYWHERE = re.compile(_CONTROL)
# Progress bars begin with a carriage return, and lines of old files end with a carriage return.
_RETURN = r"\A\r+|\r+(?=\n|\Z)"
_IN_FILES = re.compile(f"({_RETURN})|{_CONTROL}")
_ON_TERMINALS = re.compile(rf"({_RETURN}|\x1b\[[0-9;]{{0,20}}m)|{_CONTROL}")
# Cursor movements of progress bars, which come without other text.
_MOVE = re.compile(r"(?:\x1b\[\d{0,3}[AK]|\x1b\[\?25[hl]|[\r\n ])*")


def escape_controls(text: str) -> str:
    """Return a text with control characters, except line break and tab, as Python escapes.

    Use this for quotes from files, servers and libraries.
    """
    return _ANYWHERE.sub(_escape, text)


def remove_controls(text: str) -> str:
    """Return a text without control characters, except line break and tab."""
    return _ANYWHERE.sub("", text)


def escape_output(text: str, *, is_terminal: bool) -> str:
    """Return output with its control characters escaped.

    Line breaks, tabs, and the carriage returns of progress bars are kept. On a terminal, colors and
    the cursor movements of progress bars are also kept.
    """
    if not _ANYWHERE.search(text) or (is_terminal and _MOVE.fullmatch(text)):
        return text
    kept = _ON_TERMINALS if is_terminal else _IN_FILES
    return kept.sub(lambda found: found[1] or _escape(found), text)


def escape_bytes(data: bytes, *, is_terminal: bool) -> bytes:
    """Return UTF-8 output, escaped as by `escape_output`; bytes that are not UTF-8 are kept."""
    parts = re.split(r"([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape"))
    parts[::2] = [escape_output(part, is_terminal=is_terminal) for part in parts[::2]]
    return "".join(parts).encode("utf-8", "surrogateescape")


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
