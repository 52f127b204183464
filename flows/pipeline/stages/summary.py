"""Summarize a run of the flow in one JSON document."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from metaflow import current

from pipeline.cost.measured_cost import cost_numbers, cost_of_run
from pipeline.inputs.flow_run import FlowRun
from pipeline.judges.judge_budget import sum_spent
from pipeline.reports.run_page.differences import differences_section
from pipeline.reports.run_page.facts import RunFacts, curves_of
from pipeline.reports.run_page.write_page import write_run_page
from pipeline.reports.terminal import decision_in_words, render_places, render_summary
from pipeline.results.evaluation import Evaluation
from pipeline.results.report_files import as_json, write_report
from pipeline.results.reward_report import RewardReport
from pipeline.results.run_cost import RunCost
from pipeline.results.step_records import (
    FreshPairs,
    RegisteredPolicy,
    TrainedPolicy,
    ValidatedReward,
)
from pipeline.results.summary import Summary, Timings
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import track
from pipeline.storage.workspace import original_names
from pipeline.tracking.mlflow_runs import address_of_run
from pipeline.tracking.run_record import PARENT


def summarize(
    settings: Settings,
    validation: ValidatedReward,
    policy: TrainedPolicy,
    registered: RegisteredPolicy,
    run: FlowRun,
    seconds: Mapping[str, float],
    fresh: FreshPairs | None = None,
) -> dict[str, Any]:
    """Log, print and return the summary of the run, and write it to `summary_json` if set."""
    fetch_files = run.workspace.fetch_files
    validation, registered = fetch_files(validation), fetch_files(registered)
    evaluation, reward_model = registered.evaluation.report(), validation.report()
    with track(run, PARENT) as tracker:
        # `track` has fetched what earlier steps wrote on other machines; `cost_of_run` reads it.
        labeled = fresh.spent if fresh else {}
        spent = sum_spent(labeled, policy.spent, validation.spent, evaluation.spent)
        cost = cost_of_run(run, settings.hardware, policy, spent)
        summary = _summary_of(settings, evaluation, reward_model, policy, registered, seconds, cost)
        tracker.parent.log_figures(cost_numbers(cost))
        tracker.parent.log_json(as_json(summary), "summary.json")
        outcome, reasons = _outcome(registered)
        warnings = [f"Warning: {warning}" for warning in policy.warnings]
        tracker.parent.describe(outcome, [*reasons, *summary.notes, *warnings])
        facts = RunFacts(
            run=run,
            settings=settings,
            curves=curves_of(run, tracker.journal),
            reward_model=reward_model,
            warnings=policy.warnings,
            evaluation=evaluation,
            registered=registered,
            cost=cost,
            watched=policy.watched,
            since_champion=differences_section(run, settings.registered_model, evaluation.champion),
        )
        page = write_run_page(facts, tracker.parent)
        tracker.require_all_sent()
    if settings.summary_json:
        write_report(Path(settings.summary_json), summary, indent=2)
    places = render_places(
        page=page,
        run_id=str(current.run_id),
        mlflow=address_of_run(run.tracking[PARENT]),
        model=settings.registered_model,
        decision=registered.promotion,
    )
    print(render_summary(summary), places, sep="", end="", flush=True)
    # A plain dict, because clients read Metaflow's artifacts without the classes of this code.
    return as_json(summary)


def _summary_of(
    settings: Settings,
    evaluation: Evaluation,
    reward_model: RewardReport,
    policy: TrainedPolicy,
    registered: RegisteredPolicy,
    seconds: Mapping[str, float],
    cost: RunCost,
) -> Summary:
    return Summary(
        **vars(evaluation),
        # Record addresses, not local paths: this machine's disk is temporary.
        samples=original_names(str(registered.evaluation.samples)),
        judgements=original_names(str(registered.evaluation.judgements)),
        reward_model=reward_model,
        objective=policy.objective,
        warnings=policy.warnings,
        timings=Timings(
            seconds=dict(seconds),
            episodes_per_second=policy.episodes_per_second,
            peak_rss_bytes=policy.peak_rss_bytes,
        ),
        model=registered.model,
        promotion=registered.promotion,
        settings=asdict(settings),
        cost=cost,
    )


def _outcome(registered: RegisteredPolicy) -> tuple[str, list[str]]:
    """Return the outcome of the run and its reasons, for the description in MLflow."""
    decision = registered.promotion
    outcome = "Promoted" if decision.is_promoted else "Refused"
    decided = decision_in_words(decision)
    return outcome, [f"{registered.model['uri']}: {decided}.", *decision.reasons]
