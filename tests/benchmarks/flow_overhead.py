"""The overhead of the flow: Metaflow, MLflow, cards, and a process for each step.

`flows/rlhf.py` and one plain process that calls the same functions (`measure_flow_work`) do the
same work. The overhead is the difference of their wall times, each from the start of the first
process to the end of the last. It holds processes and their imports (the plain process imports
once), Metaflow's scheduling and datastore, MLflow's database, calls and uploads, hashes, reports,
figures and cards. Work that both do is not part of it: checking inputs, training, validating the
reward model, answering and judging. The files of the built-in task are made beforehand.

Nearly all of the overhead is independent of the length of the run. A line of metrics per update and
a sample of the machine every ten seconds grow with the run; a thread sends them during training.
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
"""Threads of both processes. Imports use no more, and waiting threads would add noise."""

TEN_MINUTES = 600.0
ALLOWED_SHARE, ALLOWED_SECONDS = 0.03, 20.0
"""Allowed overhead of a run: this share of its time, plus these seconds."""


@dataclass(frozen=True, kw_only=True)
class FlowOverhead:
    """Seconds of the flow and of a plain process that does the same work."""

    flow: Mapping[str, float]
    """Seconds in each of the flow's steps, imports of libraries included."""

    script: Mapping[str, float]
    """Seconds of the same work in the plain process, by step; a step without work is left out."""

    flow_seconds: float
    """From the start of the flow to its end."""

    script_seconds: float
    """From the start of the plain process to its end."""

    @property
    def seconds(self) -> float:
        """Return the overhead in seconds."""
        return self.flow_seconds - self.script_seconds

    @property
    def share(self) -> float:
        """Return the overhead as a share of a ten-minute run."""
        return self.seconds / TEN_MINUTES

    def between_steps(self) -> tuple[float, float]:
        """Return seconds outside the steps (processes, scheduling, cards) of flow and script."""
        return (
            self.flow_seconds - sum(self.flow.values()),
            self.script_seconds - sum(self.script.values()),
        )


def measure_flow(folder: Path, *, episodes: int = EPISODES) -> FlowOverhead:
    """Do the built-in task by a plain process and by the flow, in a scratch folder.

    Trainings are short, and PPO samples `episodes` responses. Models, prompts and judged answers
    have the sizes of the task.

    Raises:
        MeasurementError: one of the processes failed.
    """
    work = [sys.executable, "-m", "tests.benchmarks.measure_flow_work"]
    run_timed([*work, "make", str(folder), str(episodes)], folder)
    script_seconds, printed = run_timed([*work, "run", str(folder)], folder)
    summary = folder / "summary.json"
    command = [*flow_command(folder / "settings.toml"), "--summary-json", str(summary)]
    flow_seconds, _ = run_timed(command, folder)
    return FlowOverhead(
        flow=json.loads(summary.read_text(encoding="utf-8"))["timings"]["seconds"],
        # Earlier lines may be from libraries.
        script=json.loads(printed.splitlines()[-1]),
        flow_seconds=flow_seconds,
        script_seconds=script_seconds,
    )


def flow_command(settings: Path) -> list[str]:
    """Return the command that runs the flow with a settings file."""
    flow = str(ROOT / "flows" / "rlhf.py")
    return [sys.executable, flow, "--config", "settings", str(settings), "run"]


def run_timed(command: list[str], folder: Path, *, threads: int = THREADS) -> tuple[float, str]:
    """Run a command in `folder`; return its seconds and standard output.

    Raises:
        MeasurementError: the command failed.
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
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
    """Return a table with a row per step, one for the time between steps, and the total."""
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
