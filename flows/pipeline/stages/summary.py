"""Summarize a run of the flow in one JSON document."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.cost.measured_cost import cost_numbers, cost_of_run
from pipeline.inputs.flow_run import FlowRun
from pipeline.reports.terminal import decision_in_words, render_summary
from pipeline.results.report_files import as_json, write_report
from pipeline.results.step_records import (
    RegisteredPolicy,
    TrainedPolicy,
    ValidatedReward,
)
from pipeline.settings.settings import Settings, as_plain_dict
from pipeline.stages.tracked import track
from pipeline.storage.workspace import original_names
from pipeline.tracking.run_record import PARENT


def summarize(
    settings: Settings,
    validation: ValidatedReward,
    policy: TrainedPolicy,
    registered: RegisteredPolicy,
    run: FlowRun,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Log, print and return the summary of the run, and write it to `summary_json` if set."""
    fetch_files = run.workspace.fetch_files
    validation, registered = fetch_files(validation), fetch_files(registered)
    summary = {
        **registered.evaluation.report(),
        "reward_model": validation.report(),
        "objective": {name: asdict(change) for name, change in policy.objective.items()},
        "warnings": policy.warnings,
        "timings": {
            "seconds": dict(seconds),
            "episodes_per_second": policy.episodes_per_second,
            "peak_rss_bytes": policy.peak_rss_bytes,
        },
        "model": registered.model,
        "promotion": asdict(registered.promotion),
        "settings": as_plain_dict(settings),
    }
    # Record addresses, not local paths: this machine's disk is temporary.
    summary |= {name: original_names(summary[name]) for name in ("samples", "judgements")}
    with track(run, PARENT) as tracker:
        # Read inside, because the files of earlier steps may come from another machine.
        cost = cost_of_run(run, settings.hardware, policy, registered.evaluation)
        summary["cost"] = cost
        tracker.parent.log_metrics(cost_numbers(cost))
        plain = summary | {"reward_model": as_json(summary["reward_model"])}
        tracker.parent.log_json(plain, "summary.json")
        outcome, reasons = _outcome(registered)
        warnings = [f"Warning: {warning}" for warning in policy.warnings]
        tracker.parent.describe(outcome, [*reasons, *summary["notes"], *warnings])
        tracker.require_all_sent()
    if settings.summary_json:
        write_report(Path(settings.summary_json), plain, indent=2)
    print(render_summary(summary), flush=True)
    return plain


def _outcome(registered: RegisteredPolicy) -> tuple[str, list[str]]:
    """Return the outcome of the run and its reasons, for the description in MLflow."""
    decision = registered.promotion
    # Also true if a person promoted the version before the run decided.
    outcome = "Promoted" if decision.champion == decision.version else "Refused"
    decided = decision_in_words(decision.version, decision.champion)
    return outcome, [f"{registered.model['uri']}: {decided}.", *decision.reasons]
