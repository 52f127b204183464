"""List the runs of the flow RLHF, and compare two of them.

    python flows/runs.py list [--json]
    python flows/runs.py diff RUN RUN [--json]

RUN is the id of a run, such as RLHF/1795736811895441, or the number in the id. Both commands read
the runs in MLflow; `list` also shows the runs of this machine. MLFLOW_TRACKING_URI names the
server.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pipeline.settings.environment import run_and_exit
from ppo_core.config.field_checks import refuse_secrets
from ppo_core.errors import ConfigError, PPOError
from ppo_core.errors.control_characters import escape_controls

if TYPE_CHECKING:
    from pipeline.tracking.run_list import ListedRun

WIDTH = 120
"""Width in characters of a table that is not printed to a terminal."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 after an error."""
    arguments = _parser().parse_args(argv)
    try:
        refuse_secrets(vars(arguments))
        if arguments.command == "list":
            show_list(_all_runs(arguments.output_dir), as_json=arguments.json)
        else:
            show_diff(_all_runs(arguments.output_dir), arguments.runs, as_json=arguments.json)
    except PPOError as error:
        print(f"runs: {error}", file=sys.stderr)
        return 1
    return 0


def show_list(runs: Sequence["ListedRun"], *, as_json: bool) -> None:
    """Print all runs, oldest first."""
    if as_json:
        print(json.dumps([asdict(one) for one in runs], indent=2))
        return
    if not runs:
        print("There is no run yet. `python flows/rlhf.py run` starts one.")
        return
    columns = ("run", "started, UTC", "state", "verdict", "win rate", "KL", "cost")
    _print_table(columns, (_cells(one) for one in runs))


def show_diff(runs: Sequence["ListedRun"], names: Sequence[str], *, as_json: bool) -> None:
    """Print the differences between two runs, and their results side by side.

    Raises:
        ConfigError: a name is not a run, or MLflow does not have the run.
    """
    from pipeline.reports.run_page.differences import compare_runs
    from pipeline.tracking.run_list import find_run

    found = [find_run(runs, name) for name in names]
    ids = [_id_in_mlflow(one) for one in found]
    rows, results = compare_runs(*ids)
    first, second = (one.run for one in found)
    verdicts = ("verdict", *(one.verdict or one.state for one in found))
    results = [verdicts, *results]
    if as_json:
        differences = [dict(zip(("kind", "name", first, second), row, strict=True)) for row in rows]
        shown = {name: {first: one, second: other} for name, one, other in results}
        print(json.dumps({"differences": differences, "results": shown}, indent=2))
        return
    if rows:
        _print_table(("differs", "", first, second), rows)
    else:
        print("Settings, code, data and packages are equal.")
    print()
    _print_table(("result", first, second), results)


def _all_runs(output_dir: str) -> list["ListedRun"]:
    # Imported here: MLflow reads the prepared environment when it is imported.
    from pipeline.tracking.mlflow_client import check_databases
    from pipeline.tracking.run_list import list_runs

    check_databases(must_exist=True)
    return list_runs(Path(output_dir, "runs"))


def _id_in_mlflow(run: "ListedRun") -> str:
    if run.mlflow_run is None:
        raise ConfigError(
            f"MLflow does not have {run.run}, so the run cannot be compared. Set "
            f"MLFLOW_TRACKING_URI to the server that tracked it. Its files are in {run.folder}."
        )
    return run.mlflow_run


def _cells(run: "ListedRun") -> tuple[str, ...]:
    """Return a run as a row of the table."""
    rate = ""
    if run.win_rate is not None and run.rival is not None:
        rate = f"{run.win_rate:.1%} against {'SFT' if run.rival == 'sft' else run.rival}"
        if run.low is not None and run.high is not None:
            rate += f", {run.low:.1%} .. {run.high:.1%}"
    cost = [] if run.gpu_hours is None else [f"{run.gpu_hours:.2f} GPU h"]
    cost += [] if run.price is None else [f"{run.price:.2f} $"]
    kl = "" if run.kl is None else f"{run.kl:.2f}"
    began = run.started[:16].replace("T", " ")
    verdict = " ".join(filter(None, (run.verdict, f"({run.model})" if run.model else "")))
    return run.run, began, run.state, verdict if run.verdict else "", rate, kl, ", ".join(cost)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for column in columns:
        table.add_column(escape_controls(column), overflow="fold")
    for row in rows:
        table.add_row(*(escape_controls(cell) for cell in row))
    # Markup is off, because settings may contain brackets. In a log, rich would use 80 columns.
    width = None if sys.stdout.isatty() else WIDTH
    Console(markup=False, emoji=False, highlight=False, width=width).print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python flows/runs.py",
        description="List the runs of the flow RLHF, and compare two of them.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, does: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=does, description=does)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.add_argument(
            "--output-dir", default="outputs", help="output_dir of the runs (default: outputs)"
        )
        return added

    command("list", "Print the runs in MLflow and of this machine, oldest first.")
    compared = command("diff", "Print the settings, data and packages that differ, and results.")
    compared.add_argument("runs", metavar="RUN", nargs=2, help="id or number of a run")
    return parser


if __name__ == "__main__":
    run_and_exit(main)
