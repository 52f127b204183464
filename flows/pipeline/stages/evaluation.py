"""Judge the trained policy's answers against the references, SFT and the champion."""

from pipeline.evaluation.evaluate_policies import evaluate_policies
from pipeline.inputs.flow_run import FlowRun
from pipeline.promotion.champion import fetch_again
from pipeline.reports.log_reports import log_evaluation
from pipeline.results import EvaluatedPolicy, FetchedChampion, PreparedModel, TrainedPolicy
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import track


def evaluate_win_rate(
    settings: Settings,
    sft: PreparedModel,
    policy: TrainedPolicy,
    champion: FetchedChampion | None,
    run: FlowRun,
) -> EvaluatedPolicy:
    """Judge the policy's answers, and log the report."""
    with track(run, "evaluate_win_rate", patient=True) as tracker:
        champion = fetch_again(settings, champion)
        evaluation = evaluate_policies(settings, sft.path, policy.path, champion, run.folder)
        log_evaluation(tracker, evaluation.report())
    return evaluation
