"""Show a run of a flow on this machine: a few lines in a log, or a panel on a terminal.

By default, Metaflow prints every line of every step, with time, step and process. This module does
not change the stored logs, which Metaflow's command `logs` prints.
"""

import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, TextIO, cast

from metaflow import Flow, FlowSpec
from metaflow._vendor.click import utils
from metaflow._vendor.click.types import BoolParamType
from metaflow.exception import MetaflowException
from metaflow.parameters import flow_context
from metaflow.runtime import NativeRuntime
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.inputs.flow_run import PAGE
from pipeline.reports.live.live_panel import WIDTH, LivePanel
from ppo_core.errors.control_characters import escape_controls
from ppo_core.errors.redaction import redact
from ppo_core.io.progress_bar import PROGRESS

QUIET, QUIET_VARIABLE = "--quiet", "METAFLOW_QUIET"
"""Metaflow's option before the command `run`, and the environment variable that replaces it."""

HELD_LINES = 10_000
"""Maximum number of lines of a failed step that are shown, counted from the end."""

_KILLED = "[KILLED BY ORCHESTRATOR]"
"""Metaflow's message about a task that it killed, because the task did not end in time."""

_UNREADABLE = (
    MetaflowException,
    UnpicklingError,
    AttributeError,
    EOFError,
    KeyError,
    OSError,
    TypeError,
    ValueError,
)
"""Errors that occur while reading a missing, old or damaged result of another run."""

_TASK = re.compile(r"\[[^/\]]+/(?P<step>\w+)/\S+( \(pid (?P<pid>\d+)\))?\]")
"""Prefix that Metaflow writes before a line: run, step, task and process."""

_RUN = re.compile(r"Workflow starting \(run-id (\S+)\):")

_NOISE = re.compile(
    r"Done!|Foreach yields|Cloning results|(No|\d+) tasks? |.* not started"
    r"|Workflow failed|Terminating \d+ active tasks|Flushing logs"
)
"""Beginnings of Metaflow's messages that are not shown."""

_PROGRESS = re.compile(r"[^:]{1,200} \d+ %: \d")
"""Beginning of a line that a `ProgressBar` prints."""

_WARNING = re.compile(r"(warning|error|critical)\b|\S+:\d+: \w*Warning: ", re.IGNORECASE)
"""Beginning of a step's line that is shown even if the step does not fail."""

_CONTINUED = re.compile(r"- ")
"""Beginning of the second and later lines of a warning."""


def show_run_briefly(flow: type[FlowSpec], argv: Sequence[str]) -> None:
    """Show the run of a flow: its steps, their progress, warnings, and the lines of the last step.

    The other lines of a step are shown only if the step fails. With `--quiet`, only warnings,
    failures and the result are shown. Metaflow has no setting for its output, so this function
    replaces functions of Metaflow.

    Args:
        flow: class of the flow.
        argv: arguments of a process that runs or resumes a flow.
    """
    # Metaflow also reads its options from environment variables, such as METAFLOW_QUIET.
    given = os.environ.get(QUIET_VARIABLE, "")
    is_quiet = QUIET in argv or BoolParamType().convert(given or "0", None, None)
    os.environ[QUIET_VARIABLE] = "true"
    stream = _stream_below(sys.stdout)
    # Without `force_terminal`, FORCE_COLOR would make rich treat a log as a terminal.
    console = Console(file=stream, highlight=False, force_terminal=stream.isatty())
    terminal = RunTerminal(console, is_quiet)
    # The import of `cli` creates the options of the command line, which depend on the flow.
    with flow_context(flow):
        from metaflow import cli
    cli.logger = terminal.show
    if os.environ.get("NO_COLOR"):
        # Metaflow's copy of click does not read NO_COLOR.
        utils.should_strip_ansi = lambda *_, **__: True
    execute = NativeRuntime.execute

    def shown(runtime: Any) -> Any:
        with terminal.watching(runtime):
            return execute(runtime)

    NativeRuntime.execute = shown


class RunTerminal:
    """Prints a run to a terminal or to a log."""

    def __init__(self, console: Console, is_quiet: bool) -> None:
        """Store the console to print to."""
        self._console, self._is_quiet = console, is_quiet
        self._docs: Mapping[str, str] = {}
        self._last_step = ""
        self._panel: LivePanel | None = None
        self._held: dict[str, deque[str]] = {}
        self._is_warning: dict[str, bool] = {}

    @contextmanager
    def watching(self, runtime: Any) -> Iterator[None]:
        """Show the steps of the run that Metaflow's runtime executes; on a terminal, in a panel."""
        graph = runtime._graph
        steps = list(graph.sorted_nodes)
        self._docs = {name: (graph[name].doc or "").strip().partition("\n")[0] for name in steps}
        self._last_step = graph.end_step
        if self._is_quiet or not self._console.is_terminal or self._console.is_dumb_terminal:
            yield
            return
        with TemporaryDirectory() as folder:
            file = Path(folder, "progress.json")
            os.environ[PROGRESS] = str(file)
            name = runtime._flow.name
            self._panel = LivePanel(
                f"{name}/{runtime._run_id}", steps, seconds_of_last_run(name), file
            )
            try:
                with _live(self._panel, self._console):
                    yield
            finally:
                self._panel = None
                del os.environ[PROGRESS]

    def show(
        self,
        body: str = "",
        system_msg: bool = False,
        head: str = "",
        bad: bool = False,
        timestamp: Any = True,
        nl: bool = True,
    ) -> None:
        """Show a line, or hold it back; the parameters are the same as in Metaflow's logger."""
        # The step itself redacts its output, but not the output of native libraries.
        body, task = escape_controls(redact(body)), _TASK.match(head)
        if system_msg or bad or task is None:
            self._show_message(body, head, task, is_bad=bad)
        else:
            self._show_line(body, head, task["step"])

    def _show_message(
        self, body: str, head: str, task: re.Match[str] | None, *, is_bad: bool
    ) -> None:
        """Show a message of Metaflow itself."""
        step = task["step"] if task else ""
        if task and body.startswith("Task is starting"):
            self._start_step(step, task["pid"], is_retry="retry" in body)
        elif body.startswith("Task finished"):
            self._held.pop(head, None)
        elif body.startswith("Task failed"):
            for line in self._held.pop(head, ()):
                self._print(line)
            self._print(f"{step}: {body}", is_bad=True)
        elif body == _KILLED:
            for line in self._held.pop(head, ()):
                self._print(line)
        elif _NOISE.match(body):
            return
        elif is_bad:
            self._print(body, is_bad=True)
        elif self._is_quiet:
            return
        elif started := _RUN.match(body):
            self._print(f"Run {started[1]}")
        else:
            self._print(f"{step}: {body}" if step else body)

    def _start_step(self, step: str, pid: str, *, is_retry: bool) -> None:
        if self._panel is not None:
            self._panel.start_step(step)
        elif not self._is_quiet:
            again = ", retry" if is_retry else ""
            line = f"{datetime.now():%H:%M:%S} {step} (pid {pid}){again}: {self._docs[step]}"
            self._print(shorten(line, WIDTH, placeholder=" ..."))

    def _show_line(self, line: str, head: str, step: str) -> None:
        """Show a line of a step, or hold it back until the step fails."""
        was_warning = self._is_warning.get(head, False)
        begins = bool(_WARNING.match(line))
        is_warning = begins or bool(was_warning and _CONTINUED.match(line))
        self._is_warning[head] = is_warning
        is_page = line.startswith(PAGE) and not self._is_quiet
        if step == self._last_step or is_warning or is_page:
            self._print(line)
            if begins and self._panel is not None:
                self._panel.warn(line)
        elif _PROGRESS.match(line):
            if not self._is_quiet and self._panel is None:
                self._print(line)
        else:
            self._held.setdefault(head, deque(maxlen=HELD_LINES)).append(line)

    def _print(self, line: str, *, is_bad: bool = False) -> None:
        # Without soft_wrap, rich would break long lines in logs.
        text = Text(line, style="red" if is_bad else "")
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()


def seconds_of_last_run(flow: str) -> dict[str, float]:
    """Return step -> seconds in the last successful run; {} if the run cannot be read."""
    with suppress(*_UNREADABLE):
        run = Flow(flow).latest_successful_run
        return dict(run.data.seconds) if run else {}
    return {}


@contextmanager
def _live(panel: LivePanel, console: Console) -> Iterator[None]:
    """Draw a panel below the printed lines, and remove it at the end."""
    live = Live(
        panel,
        console=console,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with live:
        # Show the cursor while the panel is drawn, because a killed process could not restore it.
        console.show_cursor(True)
        yield


def _stream_below(stream: Any) -> TextIO:
    """Return the stream that a redacting stream wraps.

    The redacting stream would escape the control characters with which a panel is drawn.
    """
    return cast(TextIO, getattr(stream, "_stream", stream))
