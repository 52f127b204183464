"""Send entries of the journal to MLflow with calls that are safe to repeat.

MLflow identifies a metric by run, name, time, step and value, so a repeated metric is stored once.
Repeated tags, statuses and artifacts are overwritten with equal values.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from pipeline.tracking.journal import SPOILT, Entry

MAX_METRICS_PER_CALL = 1000

REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"}
"""Error codes of calls that MLflow will never accept, such as a bad name or a deleted run.

Other errors may be temporary, for example no connection, a failing server or expired credentials.
"""

Refused = tuple[Entry, str]
"""An entry that MLflow will never accept, and the reason."""


def in_calls(entries: Sequence[tuple[Entry, int]]) -> Iterator[list[tuple[Entry, int]]]:
    """Yield the entries of each call in order: metrics of one run, or one entry of another kind."""
    together: list[tuple[Entry, int]] = []
    values = 0
    for entry, position in entries:
        size = len(entry.get("values", ()))
        if together and not (
            entry["kind"] == together[0][0]["kind"] == "metrics"
            and entry["run"] == together[0][0]["run"]
            and values + size <= MAX_METRICS_PER_CALL
        ):
            yield together
            together, values = [], 0
        together.append((entry, position))
        values += size
    if together:
        yield together


def deliver(client: MlflowClient, entries: Sequence[Entry]) -> list[Refused]:
    """Send the entries of one call; return the entries that MLflow will never accept.

    Raises:
        Exception: a temporary error, from MLflow or from the client of the artifact store.
    """
    match entries[0]:
        case {"kind": "metrics", "run": run}:
            return _send_metrics(client, run, [each for entry in entries for each in _in(entry)])
        case {"kind": "file", "path": path} as entry if not Path(path).exists():
            return [(entry, f"{path} is gone")]
        case {"kind": kind} as entry if kind == SPOILT:
            return [(entry, "a power cut may have damaged it")]
    try:
        _send(client, entries[0])
    except MlflowException as error:
        if error.error_code not in REFUSALS:
            raise
        return [(entries[0], error.message)]
    return []


def _send(client: MlflowClient, entry: Entry) -> None:
    match entry:
        case {"kind": "tag", "run": run, "key": key, "value": value}:
            client.set_tag(run, key, value, synchronous=True)
        case {"kind": "status", "run": run, "status": "RUNNING"}:
            client.update_run(run, status="RUNNING")
        case {"kind": "status", "run": run, "status": status, "time": time}:
            client.set_terminated(run, status, time)
        case {"kind": "file", "run": run, "path": path, "folder": folder} if Path(path).is_dir():
            client.log_artifacts(run, path, folder or None)
        case {"kind": "file", "run": run, "path": path, "folder": folder}:
            client.log_artifact(run, path, folder or None)


def _in(entry: Entry) -> list[Metric]:
    """Return the metrics of an entry; a metric without a step gets step 0."""
    return [
        Metric(name, value, entry["time"], entry["step"] or 0)
        for name, value in entry["values"].items()
    ]


def _send_metrics(client: MlflowClient, run: str, metrics: Sequence[Metric]) -> list[Refused]:
    """Send metrics of one run; find refused metrics by bisection, and send the other metrics."""
    refused: list[Refused] = []
    for start in range(0, len(metrics), MAX_METRICS_PER_CALL):
        some = metrics[start : start + MAX_METRICS_PER_CALL]
        try:
            client.log_batch(run, metrics=some, synchronous=True)
        except MlflowException as error:
            if error.error_code not in REFUSALS:
                raise
            if len(some) == 1 or _is_gone(client, run):
                refused += [(_entry_of(run, metric), error.message) for metric in some]
            else:
                middle = len(some) // 2
                refused += _send_metrics(client, run, some[:middle])
                refused += _send_metrics(client, run, some[middle:])
    return refused


def _is_gone(client: MlflowClient, run: str) -> bool:
    """Return whether a run was deleted, either permanently or recoverably."""
    try:
        return client.get_run(run).info.lifecycle_stage == "deleted"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return True
        raise


def _entry_of(run: str, metric: Metric) -> dict[str, Any]:
    return {
        "kind": "metrics",
        "run": run,
        "time": metric.timestamp,
        "step": metric.step,
        "values": {metric.key: metric.value},
    }
