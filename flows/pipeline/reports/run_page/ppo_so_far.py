"""Add what PPO has shown so far to the data of a page, before the run has its result."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.inputs.flow_run import PPO
from pipeline.launch.job import ppo_config
from pipeline.reports.run_page.facts import EPISODE, Curves, RunFacts
from pipeline.results.watched_prompts import read_watched
from ppo_core.errors import DataError
from ppo_core.reporting.diagnosis import diagnose
from ppo_core.reporting.metrics_file import NEWEST_SAMPLES_FILE, UPDATE


def with_ppo_so_far(facts: RunFacts, warn: Callable[[str], object]) -> RunFacts:
    """Return the facts with warnings, watched prompts and newest samples of an unfinished PPO.

    The facts stay as they are before the first update. `warn` gets the reason why the watched
    prompts cannot be read.
    """
    updates = _by_update(facts.curves)
    if not updates:
        return facts
    folder, watched = facts.run.folder / PPO, []
    try:
        watched = read_watched(folder)
    except DataError as error:
        warn(str(error))
    samples = folder / NEWEST_SAMPLES_FILE
    findings = diagnose(ppo_config(facts.settings), updates)
    return replace(
        facts,
        warnings=[str(one) for one in findings],
        samples=samples if samples.exists() else None,
        watched=watched,
    )


def _by_update(curves: Curves) -> list[Mapping[str, Any]]:
    """Return the metrics of each update with its number, in the format of PPO's metrics file."""
    updates: dict[int, dict[str, float]] = {}
    for name, points in curves.items():
        for update, value in points:
            updates.setdefault(update, {UPDATE: update})[name] = value
    # Numbers without EPISODE are only steps of SFT or reward training.
    return [updates[number] for number in sorted(updates) if EPISODE in updates[number]]
