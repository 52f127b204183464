"""Strategies of hypothesis: JSON values, and files that were damaged a little."""

import json
from typing import Any

from hypothesis import strategies as st

PIECES = [
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r", b"[", b"]", b"{", b"}", b'"', b":", b","),
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"1.5", b"9" * 5000),
    *(b"\\ud800", b'"a"', b"[" * 2000, b'{"a":' * 2000, b"{}", b"[]", b"=", b"'", b"#", b"inf"),
]
"""What parsers stumble over."""

# Also halves of surrogate pairs and control characters.
texts = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(
    ["", " ", "\0", "train", "none", "nan", "1", "../x", "w1 w2", "2020-01-01"]
)
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**63, 2**64, 10**400, -0.0])

values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
"""Any JSON value, with NaN and infinity."""


@st.composite
def damaged(draw: st.DrawFn, *originals: bytes) -> bytes:
    """One of these files after a few edits."""
    content = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(content)))
        end = draw(st.integers(begin, min(len(content), begin + 40)))
        match draw(st.sampled_from(["insert", "replace", "remove", "repeat", "flip", "cut"])):
            case "insert":
                content = content[:begin] + draw(st.sampled_from(PIECES)) + content[begin:]
            case "replace":
                content = content[:begin] + draw(st.binary(max_size=8)) + content[end:]
            case "remove":
                content = content[:begin] + content[end:]
            case "repeat":
                content = content[:end] + content[begin:]
            case "flip" if begin < len(content):
                bit = bytes([content[begin] ^ 1 << draw(st.integers(0, 7))])
                content = content[:begin] + bit + content[begin + 1 :]
            case "cut":
                content = content[:begin]
    return content


@st.composite
def with_other_values(draw: st.DrawFn, original: Any) -> Any:
    """A JSON value in which a few parts are missing, added or of another form."""
    if draw(st.integers(0, 9)) == 0:
        return draw(values)
    if isinstance(original, dict):
        changed = {key: draw(with_other_values(value)) for key, value in original.items()}
        if changed and draw(st.integers(0, 5)) == 0:
            del changed[draw(st.sampled_from(sorted(changed)))]
        if draw(st.integers(0, 5)) == 0:
            changed[draw(texts)] = draw(values)
        return changed
    if isinstance(original, list):
        return [draw(with_other_values(value)) for value in original]
    return original


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def json_files(original: Any) -> st.SearchStrategy[bytes]:
    """The file of a JSON value with other values, or with damaged bytes."""
    return with_other_values(original).map(as_json) | damaged(as_json(original))
