"""Summarize a run of the flow in one JSON document."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.inputs.flow_run import FlowRun
from pipeline.reports.terminal import render_summary
from pipeline.results import RegisteredPolicy, TrainedPolicy, ValidatedReward, write_report
from pipeline.settings.settings import Settings, as_plain_dict
from pipeline.stages.tracked import track
from pipeline.tracking.tracker import PARENT


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
        write_report(Path(settings.summary_json), summary, indent=2)
    print(render_summary(summary), flush=True)
    return summary
