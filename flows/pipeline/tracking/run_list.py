"""List the runs of the flow in MLflow and on this machine, and read the facts about one run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mlflow.entities import Run

from pipeline.inputs.flow_run import QUARANTINE
from pipeline.inputs.lineage import FLOW_RUN
from pipeline.tracking.decided_runs import MODEL, has_ended, outcome_of, runs_of_step
from pipeline.tracking.mlflow_client import connect, explained
from pipeline.tracking.mlflow_runs import read_artifact
from pipeline.tracking.run_log import FIGURES, LOGGED_ARTIFACTS, read_figures
from pipeline.tracking.run_record import PARENT, RECORD, was_killed
from ppo_core.errors import ConfigError, ModelError

FLOW = "RLHF"
"""Name of the flow whose runs are listed."""

NUM_NAMED = 5
"""Number of runs that a message names."""


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run of the flow; an unknown value is None."""

    run: str
    """Id FLOW/NUMBER."""

    model: str | None = None
    """Name of the registered model."""

    started: str
    """Time in UTC, in the form of ISO 8601."""

    state: str
    """`running`, `finished`, `failed` or `killed`; for a run that MLflow does not have, `running`,
    `killed` or `not in MLflow`."""

    verdict: str | None = None
    """What the run decided, or how it ended early."""

    rival: str | None = None
    """`champion` or `sft`: the policy against which the win rate was measured."""

    win_rate: float | None = None
    low: float | None = None
    high: float | None = None
    """Win rate, and the ends of its 95 % interval."""

    kl: float | None = None
    """KL divergence of the policy from SFT, in nats per response."""

    gpu_hours: float | None = None
    price: float | None = None
    """Cost in US dollars."""

    folder: str | None = None
    """Folder of the run on this machine."""

    mlflow_run: str | None = None
    """Id of the parent run in MLflow."""


def list_runs(folder: Path) -> list[ListedRun]:
    """Return all runs, oldest first.

    Args:
        folder: folder of the runs of this machine, each in a subfolder with its number as name.

    Raises:
        ModelError: MLflow does not answer.
    """
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    here = {f"{FLOW}/{path.name}": path for path in found if _has_begun(path)}
    tracked = _tracked_runs()
    runs = [_of_mlflow(one, here.get(one.data.tags[FLOW_RUN])) for one in tracked]
    known = {one.run for one in runs}
    runs += [_of_machine(name, path) for name, path in here.items() if name not in known]
    return sorted(runs, key=lambda one: (one.started, one.run))


def _has_begun(folder: Path) -> bool:
    """Return whether a folder belongs to a run whose inputs were not refused.

    If the inputs are refused, no MLflow run is created, and the folder has only the QUARANTINE.
    """
    if not folder.name.isdecimal() or not folder.is_dir():
        return False
    return [path.name for path in folder.iterdir()] != [QUARANTINE]


def find_run(runs: Sequence[ListedRun], name: str) -> ListedRun:
    """Return the run whose id FLOW/NUMBER, or the number in its id, is `name`.

    Raises:
        ConfigError: there is no such run; the message names the newest runs.
    """
    for one in runs:
        if name in (one.run, one.run.rpartition("/")[2]):
            return one
    newest = ", ".join(one.run for one in reversed(runs[-NUM_NAMED:])) or "none"
    raise ConfigError(
        f"There is no run {name!r:.100} in MLflow or on this machine. The newest runs are: "
        f"{newest}. `python flows/runs.py list` lists all runs."
    )


@explained()
def facts_in_mlflow(run_id: str) -> tuple[Mapping[str, str], Mapping[str, float]]:
    """Return the tags, and the last values of the metrics and figures, of an MLflow run.

    Raises:
        ModelError: MLflow does not answer, or its table of figures is damaged.
    """
    data = connect().get_run(run_id).data
    # Runs of earlier versions, and runs that ended early, have no such table.
    if FIGURES not in data.tags.get(LOGGED_ARTIFACTS, ""):
        return data.tags, data.metrics
    try:
        figures = read_figures(read_artifact(run_id, FIGURES))
    except ValueError as error:
        raise ModelError(
            f"{FIGURES} of run {run_id} in MLflow is damaged: {error}. The results of this run are "
            "in summary.json of the same run."
        ) from error
    return data.tags, data.metrics | {k: v for k, v in figures.items() if v is not None}


@explained()
def _tracked_runs() -> list[Run]:
    return list(runs_of_step(PARENT))


def _of_mlflow(run: Run, folder: Path | None) -> ListedRun:
    tags, metrics = run.data.tags, run.data.metrics
    rivals = [one for one in ("champion", "sft") if f"win_rate/ppo_vs_{one}/rate" in metrics]
    contest = f"win_rate/ppo_vs_{rivals[0]}" if rivals else ""
    killed = folder is not None and was_killed(folder)
    return ListedRun(
        run=tags[FLOW_RUN],
        model=run.data.params.get(MODEL),
        started=_as_text(run.info.start_time / 1000),
        state="killed" if killed else run.info.status.lower(),
        verdict=outcome_of(run) if has_ended(run) else None,
        rival=rivals[0] if rivals else None,
        win_rate=metrics.get(f"{contest}/rate"),
        low=metrics.get(f"{contest}/low"),
        high=metrics.get(f"{contest}/high"),
        kl=metrics.get("kl/ppo"),
        gpu_hours=metrics.get("cost/gpu_hours"),
        price=metrics.get("cost/price"),
        folder=None if folder is None else str(folder),
        mlflow_run=run.info.run_id,
    )


def _of_machine(name: str, folder: Path) -> ListedRun:
    state = "not in MLflow"
    if (folder / RECORD).exists():
        state = "killed" if was_killed(folder) else "running"
    # Metaflow numbers the runs of a machine by the microseconds since 1970.
    number = int(folder.name) / 1e6
    began = number if 0 < number < 1e11 else folder.stat().st_mtime
    return ListedRun(run=name, started=_as_text(began), state=state, folder=str(folder))


def _as_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
