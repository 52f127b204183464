"""What the terminal or a log shows of a run: steps, progress, warnings, failures, the result."""

import codecs
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.helpers.paths import ROOT
from tests.helpers.slow_cases import slow

FLOW = r"""
import os
import sys
import time

from flow_parts import run_command
from metaflow import FlowSpec, step

from ppo_core.io import progress_bar

HOSTILE = "\x1b]0;title\x07\x1b[2J[red]*x*"


class Told(FlowSpec):
    @step
    def start(self):
        '''Read the inputs.

        And no more.
        '''
        print("a detail of start")
        sys.__stdout__.write(f"Warning: hostile {HOSTILE}\n")
        print("- its reason")
        self.seconds = {"start": 1.0, "work": 60.0, "end": 1.0}
        self.next(self.work)

    @step
    def work(self):
        '''Do the work.'''
        print("a detail of work")
        progress_bar.SECONDS_BETWEEN_LINES = progress_bar.SECONDS_BETWEEN_WRITES = 1e-9
        with progress_bar.progress(200, "ppo", "episode") as bar:
            for done in range(200):
                bar.set_postfix(score="1.50", kl="0.25", refresh=False)
                bar.update(1)
                time.sleep(float(os.environ.get("REST", 0)))
        if "FAILS" in os.environ:
            raise RuntimeError(f"the reason {HOSTILE} of the failure")
        self.next(self.end)

    @step
    def end(self):
        '''Print the result.'''
        print("the result")
        if "NOTES" in os.environ:
            print(f"note {HOSTILE}")


run_command(Told, is_brief=True)
"""

CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")


def environment(folder: Path, **changes: str) -> dict[str, str]:
    (folder / "told.py").write_text(FLOW)
    return {
        **os.environ,
        "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}",
        "TERM": "xterm",
        **changes,
    }


def run(folder: Path, *words: str, **changes: str) -> tuple[int, list[str]]:
    """The exit code of the flow, and the lines that it prints without a terminal."""
    ran = subprocess.run(
        [sys.executable, "told.py", *(words or ["run"])],
        cwd=folder,
        env=environment(folder, **changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout.splitlines()


def without_time(lines: list[str]) -> list[str]:
    return [re.sub(r"^\d\d:\d\d:\d\d (\w+) \(pid \d+\)", r"\1", line) for line in lines]


def test_a_log_has_a_line_for_each_step_and_each_tenth_and_no_details(tmp_path: Path):
    # FORCE_COLOR, as some CI services set it, makes no terminal of a log.
    code, lines = run(tmp_path, FORCE_COLOR="1")
    assert code == 0
    shown = without_time(lines)
    assert re.fullmatch(r"Run \d+", shown[0])
    assert shown[1] == "start: Read the inputs."
    assert shown[2].startswith("Warning: hostile ") and shown[2].endswith("[red]*x*")
    assert shown[3] == "- its reason"
    assert shown[4] == "work: Do the work."
    tenths = shown[5:-2]
    assert [line.partition(":")[0] for line in tenths] == [f"ppo {n} %" for n in range(10, 101, 10)]
    assert all(line.endswith(" left, kl=0.25, score=1.50") for line in tenths)
    assert shown[-2:] == ["end: Print the result.", "the result"]
    assert not CONTROL.search("".join(lines))


@pytest.mark.slow
def test_the_logs_of_metaflow_keep_every_line(tmp_path: Path):
    _, lines = run(tmp_path)
    (number,) = re.findall(r"Run (\d+)", lines[0])
    code, logs = run(tmp_path, "logs", f"{number}/work")
    assert code == 0
    assert any("a detail of work" in line for line in logs)
    assert sum("ppo " in line and " %: " in line for line in logs) == 10


def test_a_failure_is_shown_with_all_lines_of_its_step(tmp_path: Path):
    code, lines = run(tmp_path, FAILS="")
    text = "\n".join(lines)
    assert code == 1
    assert "a detail of work" in text and "a detail of start" not in text
    assert "Traceback" in text
    assert re.search(r"RuntimeError: the reason .* of the failure", text)
    assert "work: Task failed." in lines
    assert not re.search("Workflow failed|Terminating|Flushing", text)
    assert "the result" not in text
    assert not CONTROL.search(text.replace("\n", ""))


@pytest.mark.slow
def test_quiet_shows_warnings_and_the_result_alone_and_a_failure_in_full(tmp_path: Path):
    code, lines = run(tmp_path, "--quiet", "run")
    assert code == 0
    assert lines[0].startswith("Warning: hostile ")
    assert lines[1:] == ["- its reason", "the result"]
    code, lines = run(tmp_path, "--quiet", "run", FAILS="")
    assert code == 1
    assert "a detail of work" in lines
    assert any("the reason" in line for line in lines)


# --- A terminal ---------------------------------------------------------------------


class Terminal:
    """A run on a pseudo terminal, and everything that it has written there."""

    def __init__(self, folder: Path, **changes: str) -> None:
        self.parent, self.child = pty.openpty()
        termios.tcsetwinsize(self.child, (40, 120))
        self.before = termios.tcgetattr(self.child)
        self.process = subprocess.Popen(
            [sys.executable, "told.py", "run"],
            cwd=folder,
            env=environment(folder, **changes),
            stdin=self.child,
            stdout=self.child,
            stderr=self.child,
            start_new_session=True,
            # A program in the background of a script, such as CI, would ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.set_blocking(self.parent, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.output = ""

    def read(self) -> bool:
        """Read what is there; return whether there was anything."""
        try:
            self.output += self._decoder.decode(os.read(self.parent, 1 << 16))
        except BlockingIOError:
            return False
        return True

    def read_until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, self.output[-3000:]
            if not self.read():
                time.sleep(0.05)

    def end(self) -> int:
        self.read_until(lambda: self.process.poll() is not None)
        while self.read():
            pass
        return self.process.wait()

    def close(self) -> None:
        os.close(self.parent)
        os.close(self.child)


@pytest.fixture
def terminal(tmp_path: Path):
    opened: list[Terminal] = []

    def start(**changes: str) -> Terminal:
        opened.append(Terminal(tmp_path, **changes))
        return opened[-1]

    yield start
    for one in opened:
        if one.process.poll() is None:
            for process in psutil.Process(one.process.pid).children():
                process.kill()
        one.process.kill()
        one.process.wait()
        one.close()


def test_a_terminal_has_a_panel_and_stays_sane(terminal: Callable[..., Terminal], tmp_path: Path):
    assert run(tmp_path)[0] == 0  # whose times tell what is left
    ran = terminal(REST="0.02", NOTES="")
    assert ran.end() == 0
    shown = ran.output
    assert "Step 2 of 3, work" in shown
    assert re.search(r"\d+/200 episode +kl=0.25, score=1.50", shown)
    assert re.search(r"[\d.]+ episodes/s, phase: 0:\d\d left, ", shown)
    assert "the result" in shown
    # Neither details nor lines of progress.
    assert "a detail" not in shown and " %: " not in shown
    # The panel is removed, the cursor visible, the terminal's modes as before.
    after = shown[shown.rindex("the result") :]
    assert "╰" not in after.rpartition("\x1b[2K")[2]
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
    assert termios.tcgetattr(ran.child) == ran.before
    # The text of others is not a control sequence.
    assert "\x1b]0;" not in shown and "\x1b[2J" not in shown
    assert r"note \x1b]0;title\x07\x1b[2J[red]*x*" in shown


@pytest.mark.slow
def test_no_color_removes_the_colors(terminal: Callable[..., Terminal]):
    ran = terminal(NO_COLOR="1", REST="0.02", FAILS="")
    assert ran.end() == 1
    assert "Step 2 of 3, work" in ran.output
    assert not re.search(r"\x1b\[[\d;]*(3\d|4\d|9\d)[\d;]*m", ran.output)
    assert "RuntimeError: the reason" in ran.output


@pytest.mark.parametrize("sent", [signal.SIGINT, *slow(signal.SIGTERM, signal.SIGKILL)])
def test_a_run_that_is_interrupted_leaves_the_terminal_sane(
    terminal: Callable[..., Terminal], sent: signal.Signals
):
    ran = terminal(REST="0.5")
    ran.read_until(lambda: "/200 episode" in ran.output)
    steps = psutil.Process(ran.process.pid).children()
    if sent == signal.SIGINT:
        os.killpg(ran.process.pid, sent)  # as Ctrl-C
    else:
        ran.process.send_signal(sent)
    code = ran.end()
    # As without a panel, a killed scheduler leaves its step behind.
    for step in steps if sent == signal.SIGKILL else []:
        step.kill()
    assert code == (1 if sent == signal.SIGINT else -sent)
    assert ran.output.rfind("\x1b[?25h") > ran.output.rfind("\x1b[?25l")
    assert termios.tcgetattr(ran.child) == ran.before


def test_a_program_that_is_watched_writes_its_progress(tmp_path: Path):
    file = tmp_path / "progress.json"
    code = (
        "from ppo_core.io.progress_bar import progress\n"
        "with progress(8, 'ppo', 'episode') as bar:\n    pass"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PPO_CORE_PROGRESS": str(file)},
        check=True,
    )
    assert json.loads(file.read_text()) == {
        **{"phase": "ppo", "done": 0, "total": 8, "unit": "episode", "notes": None}
    }
