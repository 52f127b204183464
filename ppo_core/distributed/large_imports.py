"""Imports of large libraries, which a step would otherwise pay for twice."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Look for no garbage while modules are imported, nor ever among what they have made.

    torch, transformers and MLflow make a million objects that stay until the end of the process,
    and each step of a flow is one. Python would look through them all again and again while they
    grow, and once more at the end: two to three seconds a step, in which nothing is found. Not for
    a block that also works: what it leaves behind would not be freed.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
