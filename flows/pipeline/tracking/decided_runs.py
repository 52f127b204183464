"""Find MLflow runs that decided on a policy, and record what the flow Retrain found."""

from collections.abc import Iterator, Mapping
from datetime import datetime

from mlflow.entities import Run

from pipeline.inputs.lineage import FLOW_RUN
from pipeline.tracking.mlflow_client import EXPERIMENT, connect, explained
from pipeline.tracking.mlflow_runs import STEP, experiment_of
from pipeline.tracking.run_log import DESCRIPTION, description
from pipeline.tracking.run_record import ENDED_EARLY, OUTCOME, PARENT, RUNS_AGAIN
from ppo_core.errors.redaction import mask_secrets

RETRAIN = "retrain"
"""Value of the tag STEP of a run of the flow Retrain."""

REASON = "reason"
"""Tag of a run of the flow Retrain: why it started a training, or why it did not."""

MISSING_VERDICTS = "missing_verdicts"
"""Tag of a parent run whose policy was refused only because too many verdicts of the judge are
missing. The next run asks the judge again; a second such run has decided."""

MODEL = "registered_model"
"""Parameter of a parent run, and tag of a run of the flow Retrain: name of the registered model."""

PAGE = 100
"""Number of runs in one reply of MLflow."""


@explained()
def find_decided_run(lineage: Mapping[str, str]) -> str | None:
    """Return a sentence with the decision of a run with this lineage; None if no run has decided.

    A run has decided if its policy was promoted or refused, or its reward model was refused. A
    failed run has not decided, and neither has a single run with the tag MISSING_VERDICTS.

    Args:
        lineage: tags that the parent run must have.

    Raises:
        ModelError: MLflow does not answer.
    """
    undecided = 0
    for run in runs_of_step(PARENT):
        tags = run.data.tags
        has_outcome = "promotion" in tags or tags.get(OUTCOME) == "refused"
        if not has_outcome or any(tags.get(name) != value for name, value in lineage.items()):
            continue
        undecided += MISSING_VERDICTS in tags
        if MISSING_VERDICTS not in tags or undecided > 1:
            return f"{tags[FLOW_RUN]} {outcome_of(run)} from equal inputs."
    return None


def outcome_of(run: Run) -> str:
    """Return the outcome of a run of a flow in words."""
    tags = run.data.tags
    if "promotion" in tags:
        return f"{tags['promotion']} version {tags['version']}"
    if tags.get(OUTCOME) == "refused":
        return "refused its reward model"
    return tags[OUTCOME] if has_ended(run) else "has not ended"


def has_ended(run: Run) -> bool:
    """Return whether a run of a flow has decided, or ended early and was not resumed."""
    return "promotion" in run.data.tags or run.data.tags.get(OUTCOME, RUNS_AGAIN) != RUNS_AGAIN


def reason_of_outcome(run: Run) -> str:
    """Return the reason for the outcome of a run; empty if the reasons are tags of the version."""
    tags = run.data.tags
    ended_early = tags.get(OUTCOME, RUNS_AGAIN) != RUNS_AGAIN
    return tags.get(REASON, tags.get(ENDED_EARLY, "") if ended_early else "")


@explained()
def record_retrain(
    name: str,
    flow_run: str,
    outcome: str,
    reason: str,
    lineage: Mapping[str, str],
    started: datetime,
) -> None:
    """Record in MLflow what a run of the flow Retrain found.

    Args:
        name: name of the registered model.
        flow_run: id of the run of the flow Retrain.
        outcome: a few words.
        reason: a sentence.
        lineage: lineage tags of the inputs that the run found.
        started: time at which the run began to decide, before any training that it started.

    Raises:
        ModelError: MLflow does not answer.
    """
    client = connect()
    own = {FLOW_RUN: flow_run, STEP: RETRAIN, MODEL: name, OUTCOME: outcome, REASON: reason}
    text = {DESCRIPTION: description(outcome, [reason])}
    tags = {key: mask_secrets(value) for key, value in {**lineage, **own, **text}.items()}
    title = f"{started:%Y-%m-%d %H:%M} {name}: {outcome}"
    begun = int(started.timestamp() * 1000)
    run = client.create_run(experiment_of(client), begun, tags, run_name=title)
    client.set_terminated(run.info.run_id)


@explained()
def runs_of_model(name: str) -> list[Run]:
    """Return all runs of both flows for a registered model, oldest first.

    Raises:
        ModelError: MLflow does not answer.
    """
    trained = [one for one in runs_of_step(PARENT) if one.data.params.get(MODEL) == name]
    looked = [one for one in runs_of_step(RETRAIN) if one.data.tags[MODEL] == name]
    return sorted([*trained, *looked], key=lambda run: run.info.start_time)


def runs_of_step(step: str) -> Iterator[Run]:
    """Yield the runs of the experiment whose tag STEP is `step`, newest first."""
    client = connect()
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return
    token = None
    while True:
        page = client.search_runs(
            [experiment.experiment_id],
            f"tags.{STEP} = '{step}'",
            max_results=PAGE,
            order_by=["attributes.start_time DESC"],
            page_token=token,
        )
        yield from page
        if not (token := page.token):
            return
