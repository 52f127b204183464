"""Stages of the flow: functions that take the settings and earlier records, and return new records.

The module of a stage is imported on its first use, because Metaflow also parses the flow in
processes that run no step, and on machines where only Metaflow is installed.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ppo_core.distributed.process import large_imports

if TYPE_CHECKING:
    from pipeline.stages import (  # noqa: F401 - for mypy
        cards,
        check,
        evaluation,
        given_settings,
        model_win_rate,
        ppo_training,
        registration,
        sft_and_reward_models,
        start,
        summary,
        validation,
    )


if not TYPE_CHECKING:  # mypy would accept any name as a module if it saw `__getattr__`.

    def __getattr__(name: str) -> ModuleType:
        """Import the module of a stage on its first use."""
        if not (Path(__file__).parent / f"{name}.py").exists():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with large_imports():
            return import_module(f"{__name__}.{name}")
