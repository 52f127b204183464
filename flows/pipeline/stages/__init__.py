"""The stages of the flow: settings and records of `pipeline.results` in, such records out.

A module is imported when a step first asks for it. Metaflow parses the flow in processes that
run no step, and on machines that have nothing but Metaflow installed.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ppo_core.distributed.process import large_imports

if TYPE_CHECKING:
    from pipeline.stages import (  # noqa: F401 - for mypy
        cards,
        evaluation,
        models,
        registration,
        start,
        summary,
        training,
        validation,
    )


def __getattr__(name: str) -> ModuleType:
    """Import the module of a stage on its first use."""
    if not (Path(__file__).parent / f"{name}.py").exists():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with large_imports():
        return import_module(f"{__name__}.{name}")
