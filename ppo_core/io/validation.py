"""Check values against types with bounds, using pydantic; errors name the place and the value."""

import json
import re
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Record = TypeVar("Record")

Count = Annotated[int, Field(ge=1, description="a whole number, at least 1")]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32, description="at least 0 and below 2**32")]
"""A seed that numpy and torch accept."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrInf = Annotated[float, Field(gt=0, allow_inf_nan=True)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, description="between 0 and 1")]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1, description="at least 0 and below 1")]
ErrorRate = Annotated[float, Field(ge=1e-12, le=0.5, description="at least 1e-12 and at most 0.5")]
ShareAbove0 = Annotated[float, Field(gt=0, le=1, description="above 0 and at most 1")]


def _check_steps(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError("a whole number, or a fraction of the run below 1")
    return value


Steps = Annotated[float, Field(ge=0), AfterValidator(_check_steps)]
"""A number of steps, or a fraction of all steps if it is below 1."""

Interval = Annotated[float, Field(gt=0), AfterValidator(_check_steps)]
"""A number of steps, at least 1, or a fraction of all steps, above 0 and below 1."""

_FAULTS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be True or False",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "unexpected_keyword_argument": "is unknown",
}
"""Type of a pydantic error -> our description of the fault, if it is clearer than pydantic's."""

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a type."""
    return TypeAdapter(kind)


def read_record(
    value: Any, kind: type[Record], *, extra: Literal["forbid"] | None = None
) -> Record:
    """Return a parsed JSON value as an object of a type, such as a dataclass.

    Types are strict: an integer is accepted as a float, but True is not an integer, and "1" is not
    a number.

    Raises:
        ValueError: the value does not match the type; the message names the place and the value.
    """
    adapter: TypeAdapter[Record] = adapter_of(kind)  # type: ignore[arg-type]
    try:
        # Strict mode accepts a list as a tuple, or an object as a record, only in JSON input.
        return adapter.validate_json(json.dumps(value), strict=True, extra=extra)
    except ValidationError as error:
        raise ValueError(describe_error(error)) from None


def describe_error(error: ValidationError, name: str = "") -> str:
    """Describe the place of an error in the value `name`, and the fault at this place."""
    # If the type is a union, prefer errors of a member whose fields the value has.
    wrong = min(error.errors(), key=lambda one: one["type"] == "missing")
    # For a union, `loc` also has the class name of the member, which begins with an underscore.
    inner = [str(part) for part in wrong["loc"] if not str(part).startswith("_")]
    place = ".".join([name, *inner] if name else inner)
    if wrong["type"] == "missing":
        return f"{place} is missing"
    return f"{place}{'=' * bool(place)}{wrong['input']!r:.80} {describe_fault(wrong)}"


def describe_fault(wrong: ErrorDetails, kind: Any = None) -> str:
    """Return what is wrong with a value of a type, such as `must be above 0`.

    For a value out of bounds, pydantic reports only one bound. If the type has a description, which
    names all bounds, the result contains the description instead.
    """
    context = wrong.get("ctx", {})
    for name in context.keys() & _BOUNDS.keys():
        return f"must be {_description_of(kind) or f'{_BOUNDS[name]} {context[name]:g}'}"
    if wrong["type"] == "literal_error":
        choices = context["expected"].replace("''", "empty").replace(" or ", ", ")
        return f"must be one of {choices.replace(chr(39), '')}"
    if wrong["type"] == "value_error":
        return f"must be {context['error']}"
    return _FAULTS.get(wrong["type"]) or re.sub(r"^\w+ should ", "must ", wrong["msg"])


def _description_of(kind: Any) -> str | None:
    """Return the description of a type, which may be optional."""
    parts = [one for part in (kind, *get_args(kind)) for one in getattr(part, "__metadata__", ())]
    return next((one.description for one in parts if isinstance(one, FieldInfo)), None)
