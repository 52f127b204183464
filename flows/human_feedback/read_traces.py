"""Read the opinions of users from the MLflow traces of served answers."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeAlias, TypeGuard

from mlflow import MlflowClient
from mlflow.entities import Assessment, Expectation, Feedback, Trace

from human_feedback.opinions import LeftOut, Opinion, size_fault, time_of
from pipeline.tracking.mlflow_client import connect, explained
from ppo_core.data.chat_template import is_messages
from ppo_core.errors import DataError
from serving.answer_traces import CORRECTION, MODEL_TAG, PEOPLE, VERSION_TAG, served_experiment

TRACES_AT_ONCE = 100

Said: TypeAlias = Feedback | Expectation
"""An assessment that a person attached to a trace."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Thresholds for numbers as judgments: from `liked` on positive, up to `disliked` negative.

    If a threshold is None, judgments that are numbers are left out.
    """

    liked: float | None = None
    disliked: float | None = None


@dataclass
class FoundOpinions:
    """The opinions that were found, and the opinions that are left out."""

    opinions: list[Opinion] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    silent: int = 0
    """Number of answers on which no user has an opinion."""


def read_traces(
    name: str,
    scale: Scale,
    *,
    experiment: str = "",
    since: datetime | None = None,
    version: str = "",
    replaced: bool = False,
) -> FoundOpinions:
    """Read the opinions on the answers of a registered model.

    Only feedback and expectations from people are read. If a user judged an answer several times,
    only the last judgment counts; with `replaced`, all are read.

    Args:
        name: name of the registered model.
        scale: how numbers become judgments.
        experiment: MLflow experiment of the traces; if empty, `served_experiment`.
        since: read no answers from before this time.
        version: read only the answers of this version; if empty, of all versions.
        replaced: also read the judgments that the same user replaced later.

    Raises:
        DataError: there is no such experiment.
        ModelError: MLflow does not answer.
    """
    client, title = connect(), experiment or served_experiment(name)
    with explained():
        found = client.get_experiment_by_name(title)
        if found is None:
            raise DataError(
                f"MLflow has no experiment '{title}', so no served answers are recorded there. "
                "Start the service with --record, or name another experiment with `feedback.py "
                "collect --experiment`."
            )
        versions = {str(one.version) for one in client.search_model_versions(f"name='{name}'")}
        result = FoundOpinions()
        conditions = [f"tag.{MODEL_TAG} = '{name}'"]
        conditions += [f"tag.{VERSION_TAG} = '{version}'"] if version else []
        conditions += [f"timestamp_ms >= {int(since.timestamp() * 1000)}"] if since else []
        for trace in _traces(client, found.experiment_id, " AND ".join(conditions)):
            _read(trace, versions, scale, result, replaced=replaced)
    return result


def _traces(client: MlflowClient, experiment: str, conditions: str) -> Iterator[Trace]:
    token = None
    while True:
        page = client.search_traces(
            locations=[experiment],
            filter_string=conditions,
            max_results=TRACES_AT_ONCE,
            order_by=["timestamp_ms ASC"],
            page_token=token,
        )
        yield from page
        if not (token := page.token):
            return


def _read(
    trace: Trace,
    versions: Collection[str],
    scale: Scale,
    result: FoundOpinions,
    *,
    replaced: bool,
) -> None:
    """Add the opinions on one answer to `result`; see `read_traces`."""
    said = [one for one in trace.info.assessments or () if _is_of_a_person(one)]
    if not replaced:
        # MLflow marks a judgment that another one overrides as not valid.
        said = [one for one in said if one.valid is not False]
    if not said:
        result.silent += 1
        return
    source = f"trace {trace.info.trace_id}"
    answer = _answer(trace, source)
    version = answer.version if isinstance(answer, Opinion) else ""
    if version and version not in versions:
        answer = f"the answer is from version {version}, which the registry does not have"
    elif not version and isinstance(answer, Opinion):
        answer = "the answer has no version"
    if isinstance(answer, str):
        result.left_out.append(LeftOut(source, answer))
        return
    for one in said if replaced else _last(said, source, result):
        opinion = _opinion(answer, one, scale)
        if isinstance(opinion, LeftOut):
            result.left_out.append(opinion)
        else:
            result.opinions.append(opinion)


def _last(said: Collection[Said], source: str, result: FoundOpinions) -> Collection[Said]:
    """Return the last assessment of each user and name; add the earlier ones as left out."""
    last: dict[tuple[str, str], Said] = {}
    for one in sorted(said, key=lambda one: one.last_update_time_ms or 0):
        key = (_user(one), one.name)
        if key in last:
            reason = "the same user judged this answer again later"
            result.left_out.append(LeftOut(source, reason, key[0]))
        last[key] = one
    return last.values()


def _answer(trace: Trace, source: str) -> Opinion | str:
    """Return a template for opinions on the answer, or the reason why the answer is unusable.

    The template has no user, and its `liked` is the answer.
    """
    root = next((span for span in trace.data.spans if span.parent_id is None), None)
    inputs: Any = getattr(root, "inputs", None)
    outputs: Any = getattr(root, "outputs", None)
    prompt = (inputs.get("messages") or inputs.get("prompt")) if isinstance(inputs, dict) else None
    text = outputs.get("text") if isinstance(outputs, dict) else outputs
    if not (isinstance(prompt, str) or is_messages(prompt)):
        return "the answer has no prompt or messages"
    if not isinstance(text, str):
        return "the answer has no text"
    if fault := size_fault(prompt, text):
        return fault
    return Opinion(
        prompt=prompt,
        liked=text,
        disliked=None,
        user="",
        version=str(trace.info.tags.get(VERSION_TAG, "")),
        time=None,
        source=source,
    )


def _is_of_a_person(one: Assessment) -> TypeGuard[Said]:
    return isinstance(one, Said) and one.source is not None and one.source.source_type == PEOPLE


def _user(one: Said) -> str:
    # MLflow writes "default" for a source without an id.
    name = str(one.source.source_id or "") if one.source else ""
    return "" if name == "default" else name


def _opinion(answer: Opinion, one: Said, scale: Scale) -> Opinion | LeftOut:
    """Convert an assessment to an opinion; `answer` is the result of `_answer`."""
    user, value, text = _user(one), one.value, answer.liked
    known = replace(answer, user=user, time=time_of(one.create_time_ms))
    if isinstance(one, Expectation):
        if one.name != CORRECTION or not isinstance(value, str):
            reason = f"the expectation {one.name!r:.60} is not a text named {CORRECTION}"
            return LeftOut(answer.source, reason, user)
        if fault := size_fault(value):
            return LeftOut(answer.source, fault, user)
        if value == text:
            return LeftOut(answer.source, "the correction is the answer itself", user)
        return replace(known, liked=value, disliked=text)
    is_liked = _as_judgment(value, scale)
    if is_liked is None:
        reason = (
            f"the feedback {one.name!r:.60} has the value {value!r:.60}, which is not a judgment"
        )
        return LeftOut(answer.source, reason, user)
    return known if is_liked else replace(known, liked=None, disliked=text)


def _as_judgment(value: object, scale: Scale) -> bool | None:
    if isinstance(value, bool):
        return value
    if not isinstance(value, int | float) or scale.liked is None or scale.disliked is None:
        return None
    return True if value >= scale.liked else False if value <= scale.disliked else None
