"""JSON is read as records strictly; an error names the place and the value."""

from dataclasses import dataclass
from math import nan
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from ppo_core.io.validation import Finite, Natural, read_record


class _Old(BaseModel):
    size: Natural


class _New(BaseModel):
    bytes: Natural


@dataclass(frozen=True)
class Record:
    """A record with a field of each kind."""

    name: str
    sizes: tuple[Finite, ...]
    is_last: bool = False
    kind: Literal["", "a", "b"] = "a"
    file: _Old | _New | None = None


VALUE: dict[str, Any] = {"name": "n", "sizes": [1, 2.5]}


def test_a_list_becomes_a_tuple_and_what_is_unknown_is_left_out():
    read = read_record({**VALUE, "file": {"bytes": 1}, "more": nan}, Record)
    assert read == Record("n", (1.0, 2.5), file=_New(bytes=1))


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([], r"\[\] must be an object"),
        ({"name": "n"}, "^sizes is missing$"),
        ({**VALUE, "name": 1}, "^name=1 must be a text$"),
        ({**VALUE, "sizes": "12"}, "^sizes='12' must be a list$"),
        ({**VALUE, "sizes": [1, True]}, "^sizes.1=True must be a number$"),
        ({**VALUE, "sizes": [nan]}, "^sizes.0=nan must be a finite number$"),
        ({**VALUE, "sizes": [10**400]}, "^sizes.0=10+ must be a finite number$"),
        ({**VALUE, "is_last": 1}, "^is_last=1 must be True or False$"),
        ({**VALUE, "kind": "c"}, "^kind='c' must be one of empty, a, b$"),
        ({**VALUE, "file": {"bytes": -1}}, "^file.bytes=-1 must be at least 0$"),
        ({**VALUE, "file": {"size": "1"}}, "^file.size='1' must be a whole number$"),
    ],
    ids=str,
)
def test_another_form_is_refused_by_its_place(value: Any, fault: str):
    with pytest.raises(ValueError, match=fault):
        read_record(value, Record)


def test_a_record_that_may_have_no_other_fields_says_so():
    with pytest.raises(ValueError, match=r"^more=2 is unknown$"):
        read_record({**VALUE, "more": 2}, Record, extra="forbid")
