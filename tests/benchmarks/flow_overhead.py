"""What the flow costs around the work: Metaflow, MLflow, cards, and a process for each step.

The same work is done twice: by `flows/rlhf.py`, and by one plain process that calls the same
functions (`measure_flow_work`). The overhead is the difference of the two wall times, both with
everything from the start of the first process to the end of the last one. So it holds all that the
flow adds and nothing that has to be named: processes and their imports (the plain process imports
once), Metaflow's scheduling and its store, MLflow's database, calls and uploads, hashes, reports,
figures and cards. What the plain process does too is work: checking the inputs, training,
validating the reward model, answering and judging. Making the files of the built-in task is
neither: it is done before.

Nearly all of it is paid once a run, whatever its length. What grows with the run, a line of metrics
an update and a sample of the machine every ten seconds, is in the difference as well, at the length
that was run; it is sent by a thread beside the training.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tests.benchmarks.processes import ERROR_LINES, ROOT, MeasurementError
from tests.benchmarks.tables import make_table

EPISODES = 512
"""Responses that PPO samples: four updates of the built-in task."""

THREADS = 1
"""Of both: imports and calls use no more, and threads that wait for each other would be noise."""

TEN_MINUTES = 600.0
ALLOWED_SHARE, ALLOWED_SECONDS = 0.03, 20.0
"""What the overhead of a run may be: this share of it, and so many seconds."""


@dataclass(frozen=True, kw_only=True)
class FlowOverhead:
    """Seconds of the flow and of a plain process that does the same work."""

    flow: Mapping[str, float]
    """In the bodies of the flow's steps, imports of libraries included."""

    script: Mapping[str, float]
    """Of the same work in the plain process, by the same names; a step that it lacks is 0."""

    flow_seconds: float
    """From the start of the flow to its end."""

    script_seconds: float
    """From the start of the plain process to its end."""

    @property
    def seconds(self) -> float:
        """What the flow costs around the work."""
        return self.flow_seconds - self.script_seconds

    @property
    def share(self) -> float:
        """Of a run of ten minutes."""
        return self.seconds / TEN_MINUTES

    def between_steps(self) -> tuple[float, float]:
        """Seconds outside of the steps: processes, scheduling, cards; of both."""
        return (
            self.flow_seconds - sum(self.flow.values()),
            self.script_seconds - sum(self.script.values()),
        )


def measure_flow(folder: Path, *, episodes: int = EPISODES) -> FlowOverhead:
    """Do the built-in task by a plain process and by the flow, in a scratch folder.

    Trainings are short, PPO samples `episodes` responses; models, prompts and answers that are
    judged are those of the task.

    Raises:
        MeasurementError: one of the processes failed.
    """
    work = [sys.executable, "-m", "tests.benchmarks.measure_flow_work"]
    _run([*work, "make", str(folder), str(episodes)], folder)
    script_seconds, printed = _run([*work, "run", str(folder)], folder)
    summary = folder / "summary.json"
    flow_seconds, _ = _run(
        [
            *(sys.executable, str(ROOT / "flows" / "rlhf.py")),
            *("--config", "settings", str(folder / "settings.toml")),
            *("run", "--summary-json", str(summary)),
        ],
        folder,
    )
    return FlowOverhead(
        flow=json.loads(summary.read_text(encoding="utf-8"))["timings"]["seconds"],
        # Libraries may have printed before.
        script=json.loads(printed.splitlines()[-1]),
        flow_seconds=flow_seconds,
        script_seconds=script_seconds,
    )


def _run(command: list[str], folder: Path) -> tuple[float, str]:
    """Seconds that a command takes in `folder`, and what it prints."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(THREADS),
        "MKL_NUM_THREADS": str(THREADS),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "flows")]),
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
    }
    started = time.perf_counter()
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if ended.returncode:
        last = (ended.stdout + ended.stderr).splitlines()[-ERROR_LINES:]
        name = Path(command[1]).name if command[1] != "-m" else command[2]
        raise MeasurementError(f"{name} ended with {ended.returncode}:\n" + "\n".join(last))
    return seconds, ended.stdout


def flow_table(measured: FlowOverhead) -> Table:
    """A row for each step, one for what is outside of them, and the whole."""
    table = make_table(
        f"The flow around the training: {measured.seconds:.0f} s, "
        f"{measured.share:.1%} of a run of ten minutes "
        f"(allowed are {ALLOWED_SHARE:.0%} and {ALLOWED_SECONDS:.0f} s, "
        f"{ALLOWED_SHARE * TEN_MINUTES + ALLOWED_SECONDS:.0f} s)",
        "step|flow, s|plain process, s|overhead, s",
    )
    rows = {
        **{step: (own, measured.script.get(step, 0.0)) for step, own in measured.flow.items()},
        "processes, imports, scheduling, cards": measured.between_steps(),
        "all": (measured.flow_seconds, measured.script_seconds),
    }
    for name, (flow, script) in rows.items():
        table.add_row(name, *(f"{seconds:.1f}" for seconds in (flow, script, flow - script)))
    return table
