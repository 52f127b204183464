"""Register the policy as a version of the registered model, and promote or refuse it."""

from pipeline.inputs.flow_run import FlowRun
from pipeline.promotion.register_and_decide import Candidate, register
from pipeline.registry.decisions import Decision
from pipeline.reports.log_reports import log_evaluation
from pipeline.results.evaluation import Evaluation
from pipeline.results.step_records import RegisteredPolicy
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.stages.tracked import stage
from pipeline.tracking.decided_runs import MISSING_VERDICTS
from pipeline.tracking.tracker import Tracker

__all__ = ["Candidate", "register_policy"]


def register_policy(candidate: Candidate) -> RegisteredPolicy:
    """Wait until MLflow has all measurements, register the candidate, and decide on promotion."""
    return _register(candidate, candidate.run)


@stage("register")
def _register(tracker: Tracker, candidate: Candidate, run: FlowRun) -> RegisteredPolicy:
    tracker.require_all_sent()
    candidate = candidate.fetched()
    registered = register(candidate)
    if registered.evaluation != candidate.evaluation:
        log_evaluation(tracker, registered.evaluation)
    report, config = registered.evaluation.report(), candidate.settings.evaluation
    tracker.parent.set_tags(decision_tags(registered.promotion, report, config))
    return registered


def decision_tags(
    made: Decision, evaluation: Evaluation, config: EvaluationConfig
) -> dict[str, str]:
    """Return the tags of a parent run with its decision, see MISSING_VERDICTS."""
    missing = [
        name
        for name, one in evaluation.win_rate.items()
        if one.test and one.invalid > config.max_invalid * (one.n + one.invalid)
    ]
    # With missing verdicts, one of the reasons is that the evaluation is inconclusive.
    is_only_reason = len(made.reasons) == 1 and len(evaluation.reasons) == len(missing)
    return {
        "version": str(made.version),
        "promotion": made.action,
        **(
            {MISSING_VERDICTS: ", ".join(missing)}
            if missing and is_only_reason and not made.is_promoted
            else {}
        ),
    }
