"""Record served answers, and users' opinions on the answers, as MLflow traces.

The inputs of a trace are the prompt, `{"prompt": TEXT}` or `{"messages": [...]}`. The outputs are
the answer, `{"text": TEXT}`. The tags are `MODEL_TAG` and `VERSION_TAG`. A better answer is an
expectation named `CORRECTION`. A judgment is feedback of a person with a boolean value.
`record_opinion` names it `LIKED`, but the name does not count. For a label with another meaning,
use a text instead of a boolean.
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
"""Pattern of the id of a trace. Only a text that matches is used in a URL of MLflow."""

LIKED, CORRECTION = "liked", "expected_response"

PEOPLE = "HUMAN"
"""MLflow's source type for assessments by people."""


def served_experiment(name: str) -> str:
    """Return the name of the MLflow experiment for the served answers of a registered model."""
    return f"{name}-served"


def record_to(name: str) -> None:
    """Send the traces of this process to the experiment of a registered model.

    Traces are sent in the background. If MLflow does not answer, the traces are lost, but the
    service still answers.
    """
    mlflow.set_experiment(served_experiment(name))


def begin_answer(name: str, version: str, inputs: Mapping[str, Any]) -> LiveSpan:
    """Begin the trace of an answer; end the returned span with `end(outputs={"text": TEXT})`."""
    span: LiveSpan = mlflow.start_span_no_context(
        "answer", inputs=dict(inputs), tags={MODEL_TAG: name, VERSION_TAG: version}
    )
    return span


def record_opinion(
    name: str, answer: str, *, user: str, liked: bool | None, correction: str | None
) -> None:
    """Attach a user's opinion to an answer of a registered model; `answer` is the trace's id.

    Raises:
        DataError: this model has given no answer with this id, or the opinion is empty.
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
        raise ModelError(
            f"The feedback was not recorded, or only a part of it, because MLflow fails: {error}. "
            "Send the feedback again: `feedback.py collect` counts a repeated opinion once."
        ) from error


def _model_of(answer: str) -> str | None:
    """Return the name of the model that gave an answer."""
    client = MlflowClient()
    try:
        trace = client.get_trace(answer, display=False)
    except MlflowException as error:
        if not _is_missing(error):
            raise
        # Recent traces may still wait in this process. Send them first, which takes seconds.
        trace = client.get_trace(answer, display=False, flush=True)
    return trace.info.tags.get(MODEL_TAG)


def _is_missing(error: MlflowException) -> bool:
    return error.error_code in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")
