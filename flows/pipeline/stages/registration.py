"""Register the policy as a version of the registered model, and promote or refuse it."""

from pipeline.inputs.flow_run import FlowRun
from pipeline.promotion.register_and_decide import Candidate, register
from pipeline.reports.log_reports import log_evaluation
from pipeline.results.step_records import RegisteredPolicy
from pipeline.stages.tracked import stage
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
    tracker.parent.set_tags({"version": str(decision.version), "promotion": decision.action})
    return registered
