"""Record served answers as MLflow traces, and what users say about the answers.

A trace has the prompt as its inputs, `{"prompt": TEXT}` or `{"messages": [...]}`, the answer as its
outputs, `{"text": TEXT}`, and the tags `MODEL_TAG` and `VERSION_TAG`. A judgment is feedback named
`LIKED` with a boolean value, and a better answer is an expectation named `CORRECTION`.
"""

import re
from collections.abc import Mapping
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import AssessmentSource, LiveSpan
from mlflow.exceptions import MlflowException

from ppo_core.errors import DataError, ModelError

MODEL_TAG, VERSION_TAG = "served_model", "served_version"

ANSWER_ID = re.compile("tr-[0-9a-f]{1,64}")
"""Ids of traces. No other text becomes a part of MLflow's address."""

LIKED, CORRECTION = "liked", "expected_response"

PEOPLE = "HUMAN"
"""Type of the source of an assessment that a person made."""


def served_experiment(name: str) -> str:
    """Return the name of the MLflow experiment for the served answers of a registered model."""
    return f"{name}-served"


def record_to(name: str) -> None:
    """Send the traces of this process to the experiment of a registered model.

    Traces are sent in the background. If MLflow is away, they are lost, and answers are not.
    """
    mlflow.set_experiment(served_experiment(name))


def begin_answer(name: str, version: str, inputs: Mapping[str, Any]) -> LiveSpan:
    """Return the span of an answer that begins; end it with `end(outputs={"text": TEXT})`."""
    span: LiveSpan = mlflow.start_span_no_context(
        "answer", inputs=dict(inputs), tags={MODEL_TAG: name, VERSION_TAG: version}
    )
    return span


def record_opinion(
    name: str, answer: str, *, user: str, liked: bool | None, correction: str | None
) -> None:
    """Attach a user's opinion to an answer of a registered model; `answer` is the trace's id.

    Raises:
        DataError: this model has given no such answer, or the opinion is empty.
        ModelError: MLflow does not answer; nothing, or only `liked`, was recorded.
    """
    if not ANSWER_ID.fullmatch(answer):
        raise DataError(f"{answer!r:.80} is not an id of an answer.")
    if liked is None and correction is None:
        raise DataError("The feedback is empty. Give liked (true or false), a correction, or both.")
    try:
        if _model_of(answer) != name:
            raise DataError(f"There is no answer {answer} of '{name}'. Give the id of an answer.")
        source = AssessmentSource(source_type=PEOPLE, source_id=user)
        if liked is not None:
            mlflow.log_feedback(trace_id=answer, name=LIKED, value=liked, source=source)
        if correction is not None:
            mlflow.log_expectation(
                trace_id=answer, name=CORRECTION, value=correction, source=source
            )
    except MlflowException as error:
        if _is_missing(error):
            raise DataError(f"There is no answer {answer} yet. Try again in a minute.") from error
        raise ModelError(f"The feedback was not recorded, because MLflow fails: {error}") from error


def _model_of(answer: str) -> str | None:
    """Return the name of the model that gave an answer."""
    client = MlflowClient()
    try:
        trace = client.get_trace(answer, display=False)
    except MlflowException as error:
        if not _is_missing(error):
            raise
        # The answers of the last seconds wait in this process to be sent. Sending takes seconds.
        trace = client.get_trace(answer, display=False, flush=True)
    return trace.info.tags.get(MODEL_TAG)


def _is_missing(error: MlflowException) -> bool:
    return error.error_code in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")
