"""Register the policy as a version of the registered model, and promote or refuse it."""

from pipeline.inputs.flow_run import FlowRun
from pipeline.promotion.register_and_decide import Candidate, register
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
    decision = registered.promotion
    tags = {"version": str(decision.version), "promotion": decision.action}
    missing = missing_verdicts(registered.evaluation.report(), candidate.settings.evaluation)
    if missing and not decision.is_promoted:
        tags[MISSING_VERDICTS] = missing
    tracker.parent.set_tags(tags)
    return registered


def missing_verdicts(evaluation: Evaluation, config: EvaluationConfig) -> str:
    """Return the contests that decide and have more than `max_invalid` pairs without a verdict."""
    return ", ".join(
        name
        for name, one in evaluation.win_rate.items()
        if one.test and one.invalid > config.max_invalid * (one.n + one.invalid)
    )
