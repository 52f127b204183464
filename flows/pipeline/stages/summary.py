"""Summarize a run of the flow in one JSON document."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.inputs.flow_run import FlowRun
from pipeline.reports.terminal import render_summary
from pipeline.results import RegisteredPolicy, TrainedPolicy, ValidatedReward
from pipeline.settings.settings import Settings, as_plain_dict
from pipeline.stages.tracked import track
from pipeline.tracking.tracker import PARENT
from ppo_core.data.atomic_files import explained_writes, write_atomically
from ppo_core.errors.redaction import mask_secrets


def summarize(
    settings: Settings,
    validation: ValidatedReward,
    policy: TrainedPolicy,
    registered: RegisteredPolicy,
    run: FlowRun,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Log, print and return the summary of the run, and write it to `summary_json` if set."""
    summary = {
        **registered.evaluation.report(),
        "reward_model": validation.report(),
        "objective": {name: asdict(change) for name, change in policy.objective.items()},
        "timings": {
            "seconds": dict(seconds),
            "episodes_per_second": policy.episodes_per_second,
            "peak_rss_bytes": policy.peak_rss_bytes,
        },
        "model": registered.model,
        "promotion": asdict(registered.promotion),
        "settings": as_plain_dict(settings),
    }
    with track(run, PARENT) as tracker:
        tracker.parent.log_json(summary, "summary.json")
        tracker.require_all_sent()
    if settings.summary_json:
        _write(Path(settings.summary_json), mask_secrets(json.dumps(summary, indent=2)))
    print(render_summary(summary), flush=True)
    return summary


def _write(path: Path, text: str) -> None:
    with explained_writes(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a device, such as /dev/stdout
        else:
            write_atomically(path, text)
