"""Cases of a parametrized test that only `make soak` runs."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return the values as parameters that are marked slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
