"""Write the page of a run again and again while PPO trains."""

import time
from dataclasses import replace
from pathlib import Path

from pipeline.launch.job import ppo_config
from pipeline.reports.run_page.facts import Curves, RunFacts
from pipeline.reports.run_page.run_document import REFRESH_SECONDS
from pipeline.reports.run_page.write_page import write_page_file
from ppo_core.reporting.diagnosis import diagnose
from ppo_core.reporting.metrics_file import UPDATE, read_metrics

REST = 20
"""Least time between two pages, in multiples of the time that a page takes."""


class LivePage:
    """The page of a run while PPO trains, for people on this machine or on its disk."""

    def __init__(self, facts: RunFacts, metrics_file: Path) -> None:
        """Show these facts, and the metrics in the file of PPO."""
        self._facts, self._metrics_file, self._next = facts, metrics_file, 0.0

    def update(self) -> None:
        """Write the page, unless it was written less than REFRESH_SECONDS ago."""
        started = time.monotonic()
        if started < self._next or self._facts.run.workspace.store:
            return
        updates = read_metrics(self._metrics_file)
        if not updates:
            return
        curves: dict[str, list[tuple[int, float]]] = {}
        for metrics in updates:
            for name, value in metrics.items():
                curves.setdefault(name, []).append((int(metrics[UPDATE]), value))
        trained: dict[str, Curves] = {**self._facts.curves, "train_policy": curves}
        warnings = [str(one) for one in diagnose(ppo_config(self._facts.settings), updates)]
        write_page_file(replace(self._facts, curves=trained, warnings=warnings))
        ended = time.monotonic()
        self._next = ended + max(REFRESH_SECONDS, REST * (ended - started))
