"""Create and read the MLflow runs of one run of the flow: a parent, and a child for each step."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from shlex import quote
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking.context.registry import resolve_tags
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_PARENT_RUN_ID
from sqlalchemy.exc import SQLAlchemyError

from pipeline.inputs.lineage import FLOW_RUN, DataSet
from pipeline.settings.make_settings import flatten
from pipeline.tracking.journal import Journal
from pipeline.tracking.mlflow_client import (
    EXPERIMENT,
    check_databases,
    connect,
    create_experiment,
    explained,
)
from pipeline.tracking.mlflow_facts import MAX_PARAM_CHARACTERS
from pipeline.tracking.run_record import PARENT
from ppo_core.errors import ModelError, reason_of
from ppo_core.errors.deadline import answer_within
from ppo_core.errors.redaction import mask_secrets, redact
from serving.artifact_store import asking_the_store, prepare_mlflow

STEP = "step"
"""MLflow tag with the name of the step, or PARENT for the parent run."""

MAX_PARAMS_PER_CALL = 100

ANSWER_SECONDS = 60.0
"""Maximum wait in seconds for a small artifact."""


def start_runs(
    name: str,
    flow_run: str,
    settings: Mapping[str, Any],
    tags: Mapping[str, str],
    steps: Sequence[str],
) -> dict[str, str]:
    """Create the MLflow runs; return their ids by step name, with the parent's id at `parent`.

    Only missing runs are created, so a retried start reuses its runs. Runs of steps that have not
    started have the status SCHEDULED.

    Args:
        name: short description, such as the name of the registered model.
        flow_run: id of the run of the flow.
        settings: parameters of the parent; names of nested tables are joined by dots.
        tags: tags of the parent.
        steps: names of the steps that get a run.

    Raises:
        ModelError: MLflow does not answer, or refuses a request; or see `experiment_of`.
    """
    check_databases()
    server = mlflow.get_tracking_uri()
    try:
        client = connect()
        experiment = experiment_of(client)
        # The title starts with the time, because lists show only the beginning of a title.
        title = f"{datetime.now(UTC):%Y-%m-%d %H:%M} {name}"
        parent = _parent(client, experiment, title, flow_run, tags)
        _log_settings(client, parent, settings)
        runs = {PARENT: parent, **_children(client, experiment, flow_run, parent, steps)}
    except (MlflowException, SQLAlchemyError) as error:
        raise ModelError(
            f"MLflow at {server} cannot start a run: {reason_of(error)}. Nothing would be tracked, "
            "and no policy registered. Repair this server, or set MLFLOW_TRACKING_URI to another "
            "server, and run again."
        ) from error
    if server.startswith("http"):
        print(f"MLflow: {address_of_run(parent)}", flush=True)
    return runs


def address_of_run(run_id: str) -> str:
    """Return the address of a run's page in MLflow; without a server, the command for MLflow's UI.

    Raises:
        ModelError: MLflow does not answer.
    """
    server = mlflow.get_tracking_uri()
    if not server.startswith("http"):
        return f"mlflow ui --backend-store-uri {quote(server)}"
    return f"{server.rstrip('/')}/#/experiments/{_experiment_of_run(run_id)}/runs/{run_id}"


@explained()
def _experiment_of_run(run_id: str) -> str:
    return str(connect().get_run(run_id).info.experiment_id)


@explained()
def started_at(run_id: str) -> datetime:
    """Return when an MLflow run was started, in UTC.

    Raises:
        ModelError: MLflow does not answer, or has no such run.
    """
    return datetime.fromtimestamp(connect().get_run(run_id).info.start_time / 1000, UTC)


def read_artifact(run_id: str, name: str) -> str:
    """Return the text of a small artifact of an MLflow run.

    Raises:
        ModelError: MLflow or the store does not answer, or the run has no such artifact.
    """
    connect()
    prepare_mlflow()
    with asking_the_store(f"run {run_id} in MLflow"):
        read = partial(mlflow.artifacts.load_text, f"runs:/{run_id}/{name}")
        return str(answer_within(ANSWER_SECONDS, read))


def find_runs(flow_run: str) -> dict[str, str]:
    """Return the ids of the MLflow runs of a run of the flow, as `start_runs` returned them.

    The result is empty if MLflow has no such run. If a step has several runs, the oldest run is
    returned, and the others are deleted (see `_runs`).

    Raises:
        MlflowException: MLflow does not answer.
    """
    client = connect()
    found = client.get_experiment_by_name(EXPERIMENT)
    return _runs(client, found.experiment_id, flow_run) if found else {}


def experiment_of(client: MlflowClient) -> str:
    """Return the id of the experiment of the flow; the first run creates the experiment.

    Raises:
        ModelError: the experiment was deleted.
    """
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        return create_experiment(client, EXPERIMENT)
    if found.lifecycle_stage != "active":
        raise ModelError(
            f"The MLflow experiment '{EXPERIMENT}', which holds the runs of the flow, was deleted. "
            f"Restore it with `mlflow experiments restore --experiment-id {found.experiment_id}`."
        )
    return found.experiment_id


@explained()
def artifact_root(*, create: bool) -> str:
    """Return the address of the folder with the artifacts of the runs of the flow.

    The address belongs to the experiment. If the experiment does not exist, `create` decides: True
    creates it, and False returns an empty text.

    Raises:
        ModelError: MLflow does not answer.
    """
    client = connect()
    if create:
        experiment_of(client)
    found = client.get_experiment_by_name(EXPERIMENT)
    return str(found.artifact_location) if found else ""


@explained()
def log_data(run_id: str, data: Sequence[DataSet]) -> None:
    """Log data sets as inputs of an MLflow run; repeated calls change nothing.

    Raises:
        ModelError: MLflow does not answer.
    """
    connect().log_inputs(run_id, [_input(one) for one in data])


def remember_sent_metrics(journal: Journal, runs: Sequence[str]) -> None:
    """Make the journal skip the metrics of `runs` that MLflow already has.

    A machine may have sent these metrics before it was lost with its journal. If MLflow does not
    answer, print a warning and continue: at worst, MLflow shows some points of a curve twice, with
    equal values.
    """
    try:
        client = connect()
        for run in runs:
            for name in client.get_run(run).data.metrics:
                for metric in client.get_metric_history(run, name):
                    journal.remember_metric(run, metric.step, name)
    except (ModelError, MlflowException, SQLAlchemyError, OSError) as error:
        print(
            "Warning: MLflow did not answer which metrics of the earlier attempt it has "
            f"({redact(error)}). The step continues; MLflow may show some points twice.",
            flush=True,
        )


def _input(one: DataSet) -> DatasetInput:
    dataset = Dataset(
        name=one.name,
        digest=one.digest,
        source_type="local",
        source=json.dumps({"uri": one.source}),
        profile=json.dumps({"num_rows": one.rows, "left_out": one.left_out}),
    )
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, one.name)])


def _parent(
    client: MlflowClient, experiment: str, name: str, flow_run: str, tags: Mapping[str, str]
) -> str:
    own = {FLOW_RUN: flow_run, STEP: PARENT}
    if PARENT not in _runs(client, experiment, flow_run):
        client.create_run(experiment, run_name=name, tags=_all_tags({**tags, **own}))
    return _runs(client, experiment, flow_run)[PARENT]


def _children(
    client: MlflowClient, experiment: str, flow_run: str, parent: str, steps: Sequence[str]
) -> dict[str, str]:
    found = _runs(client, experiment, flow_run)
    for step in steps:
        if step not in found:
            tags = {FLOW_RUN: flow_run, STEP: step, MLFLOW_PARENT_RUN_ID: parent}
            run = client.create_run(experiment, run_name=step, tags=_all_tags(tags))
            client.update_run(run.info.run_id, status="SCHEDULED")
    runs = _runs(client, experiment, flow_run)
    return {step: runs[step] for step in steps}


def _all_tags(own: Mapping[str, str]) -> dict[str, str]:
    """Return our tags and MLflow's tags, with secrets masked; a git remote may contain secrets."""
    return {name: redact(value) for name, value in resolve_tags(own).items()}


def _runs(client: MlflowClient, experiment: str, flow_run: str) -> dict[str, str]:
    """Return the ids of the existing runs by step name.

    If the reply to a creation is lost, the repeated call creates a second run, which is deleted
    here. If the user may not delete runs, such as `train` of infra/mlflow, the second run
    stays in MLflow, unused.
    """
    first: dict[str, Run] = {}
    for run in client.search_runs(
        [experiment],
        f"tags.{FLOW_RUN} = '{flow_run}' and tags.{STEP} != ''",
        order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
    ):
        if first.setdefault(run.data.tags[STEP], run) is not run:
            _delete_if_allowed(client, run.info.run_id)
    return {step: run.info.run_id for step, run in first.items()}


def _delete_if_allowed(client: MlflowClient, run_id: str) -> None:
    try:
        client.delete_run(run_id)
    except MlflowException as error:
        if error.error_code != "PERMISSION_DENIED":
            raise


def _log_settings(client: MlflowClient, run_id: str, settings: Mapping[str, Any]) -> None:
    params = [
        Param(key, mask_secrets(str(value))[:MAX_PARAM_CHARACTERS])
        for key, value in flatten(settings).items()
    ]
    for start in range(0, len(params), MAX_PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS_PER_CALL])
