"""Steps that are forked from a server behave as processes that Metaflow starts itself."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from metaflow_glue.forked_steps import StepServer
from pipeline.launch.forked_processes import ForkedProcess
from tests.helpers.paths import ROOT

PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
TOLD = "import json, os, random, sys; print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), "
TOLD += "sys.stdin.read(), 'colorsys' in sys.modules, random.random(), os.getppid(), sys.path[0]]))"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def interruptible() -> Iterator[None]:
    """Let SIGINT end the processes; they would ignore it if a script started pytest with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def server() -> Iterator[StepServer]:
    server = StepServer(["colorsys"])
    yield server
    server.close()


@pytest.fixture
def start(server: StepServer, tmp_path: Path) -> Callable[..., ForkedProcess]:
    """Return a function that starts a program as a step."""

    def begin(program: str, **environment: str) -> ForkedProcess:
        (tmp_path / "flow.py").write_text(program)
        argv = [sys.executable, str(tmp_path / "flow.py"), "--quiet", "step", "train", "--seed=1"]
        step = server.start(argv, env={**os.environ, **environment}, **PIPES)
        assert isinstance(step, ForkedProcess)
        return step

    return begin


def test_a_step_has_its_arguments_folder_environment_and_an_empty_input(start, tmp_path: Path):
    step = start(TOLD, ONLY="here")
    assert step.wait() == 0
    assert step.stderr.read() == b""
    argv, folder, environment, given, has_imported, _, parent, first = json.loads(
        step.stdout.read()
    )
    assert argv == [str(tmp_path / "flow.py"), "--quiet", "step", "train", "--seed=1"]
    assert folder == os.getcwd()
    assert environment == {**os.environ, "ONLY": "here"}
    assert given == ""
    assert has_imported
    assert psutil.Process(parent).ppid() == os.getpid()
    assert first == str(tmp_path)


def test_a_step_finds_modules_in_relative_paths_of_its_own_folder(
    server: StepServer, tmp_path: Path, monkeypatch
):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "users_module.py").write_text("print('found')")
    (tmp_path / "flow.py").write_text("import users_module")
    monkeypatch.chdir(tmp_path)
    argv = [sys.executable, "flow.py", "--quiet", "step", "train"]
    step = server.start(argv, env={**os.environ, "PYTHONPATH": "beside"}, **PIPES)
    assert isinstance(step, ForkedProcess)
    assert (step.wait(), step.stdout.read()) == (0, b"found\n")


def test_steps_draw_different_random_numbers(start):
    steps = [start(TOLD) for _ in range(2)]
    drawn = [json.loads(step.stdout.readline())[5] for step in steps]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(4)", 4),
        ("raise ValueError('why')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2),
        ("import atexit; atexit.register(print, 'the end')", 0),
    ],
)
def test_a_step_ends_as_a_python_process_does(start, tmp_path: Path, program: str, code: int):
    step = start(program)
    assert step.wait() == step.poll() == code
    plain = subprocess.run([sys.executable, tmp_path / "flow.py"], capture_output=True, check=False)
    assert plain.returncode == code
    assert step.stdout.read() == plain.stdout
    assert step.stderr.read().splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_a_library_that_was_imported_before_finds_its_names_in_the_main_module(tmp_path: Path):
    (tmp_path / "flow.py").write_text(
        "import pickle; from metaflow.tuple_util import ForeachFrame as Frame\n"
        "class Own: pass\n"
        "assert isinstance(pickle.loads(pickle.dumps(Own())), Own)\n"
        "print(pickle.loads(pickle.dumps(Frame('step', 'var', 2, 1, 'x'))).num_splits)"
    )
    server = StepServer(["metaflow.tuple_util"])
    step = server.start([sys.executable, str(tmp_path / "flow.py"), "step"], env=dict(os.environ))
    assert step.stdout.read() == b"2\n", step.stderr.read()
    server.close()


def test_a_running_step_has_its_own_process_and_can_be_killed(start):
    step = start("print('begun', flush=True); import time; time.sleep(60)")
    assert step.stdout.readline() == b"begun\n"
    assert step.poll() is None
    assert psutil.Process(step.pid).status() != psutil.STATUS_ZOMBIE
    step.kill()
    assert step.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(step.pid)
    step.kill()


def test_signals_to_all_processes_of_a_run_reach_the_steps_alone(server: StepServer, start):
    step = start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('begun', flush=True); time.sleep(60)"
    )
    step.stdout.readline()
    for process in (psutil.Process(step.pid).parent(), psutil.Process(step.pid)):
        process.send_signal(signal.SIGTERM)
    assert step.wait() == 5
    assert start("pass").wait() == 0


def test_a_step_sees_its_own_file_and_none_of_the_servers_names_and_its_streams_cannot_seek(
    start, tmp_path: Path
):
    step = start(
        "print(__file__, __doc__, *(name for name in globals() if not name.startswith('__')))\n"
        "import sys; print(sys.stdout.buffer.seekable(), sys.stderr.buffer.seekable())"
    )
    assert step.stdout.read().decode() == f"{tmp_path / 'flow.py'} None\nFalse False\n"


def test_steps_draw_different_numbers_from_libraries_too(tmp_path: Path):
    (tmp_path / "flow.py").write_text(
        "import numpy, datasets.fingerprint\n"
        "print(numpy.random.rand(), datasets.fingerprint.generate_random_fingerprint())"
    )
    server, argv = StepServer(["datasets"]), [sys.executable, str(tmp_path / "flow.py"), "step"]
    steps = [server.start(argv, env=dict(os.environ)) for _ in range(2)]
    (one, two), (other, another) = (step.stdout.read().split() for step in steps)
    assert one != other and two != another
    server.close()


def test_a_step_that_its_run_no_longer_waits_for_is_not_started(tmp_path: Path):
    (tmp_path / "sleep.py").write_text("import time; time.sleep(2)")
    (tmp_path / "flow.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    argv = [sys.executable, str(tmp_path / "flow.py"), "step"]
    run = (
        "import sys, os; sys.path[:0] = sys.argv[2].split()\n"
        "os.environ['PYTHONPATH'] = sys.argv[1]\n"
        "from metaflow_glue.forked_steps import StepServer\n"
        f"StepServer(['sleep']).start({argv}, env=dict(os.environ))"
    )
    paths = [str(tmp_path), f"{ROOT / 'flows'} {ROOT}"]
    process = subprocess.Popen([sys.executable, "-c", run, *paths], stderr=subprocess.DEVNULL)
    waited = psutil.Process(process.pid)
    while not waited.children():
        time.sleep(0.02)
    (server,) = waited.children()
    process.send_signal(signal.SIGINT)
    process.wait(10)
    psutil.wait_procs([server], 20)
    assert not server.is_running()
    assert not (tmp_path / "started").exists()


def test_a_run_with_much_in_its_environment_starts_its_steps(start):
    step = start(TOLD, LARGE="x" * 100_000, ODD="\udcff")
    assert len(json.loads(step.stdout.readline())[2]["LARGE"]) == 100_000


@pytest.mark.parametrize("argv", [["/bin/echo", "step"], [sys.executable, "-V", "batch", "step"]])
def test_a_step_elsewhere_or_of_another_python_is_started_as_before(
    server: StepServer, argv: list[str]
):
    process = server.start(argv, env=dict(os.environ), **PIPES)
    assert isinstance(process, subprocess.Popen)
    assert process.wait() == 0


def test_the_server_ends_with_the_run_but_not_before_its_steps(tmp_path: Path):
    server = StepServer([])
    (tmp_path / "flow.py").write_text("import time; time.sleep(1); print('done')")
    step = server.start([sys.executable, str(tmp_path / "flow.py"), "step"], env=dict(os.environ))
    process = psutil.Process(step.pid).parent()
    server.close()
    assert step.stdout.read() == b"done\n"
    assert process.wait(10) in (0, None)


def test_a_step_dies_with_its_server_and_the_next_one_is_started_as_before(tmp_path: Path):
    server = StepServer([])
    argv = [sys.executable, str(tmp_path / "flow.py"), "step"]
    (tmp_path / "flow.py").write_text("import time; time.sleep(60)")
    step = server.start(argv, env=dict(os.environ))
    psutil.Process(step.pid).parent().kill()
    assert step.wait() == -signal.SIGKILL
    (tmp_path / "flow.py").write_text("print('done')")
    again = server.start(argv, env=dict(os.environ), **PIPES)
    assert isinstance(again, subprocess.Popen)
    assert again.communicate()[0] == b"done\n"


@pytest.mark.parametrize("module", ["a_module_that_is_not_there", "no_pidfd"])
def test_a_server_that_cannot_serve_starts_no_step_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
):
    (tmp_path / "no_pidfd.py").write_text("import os; del os.pidfd_open")
    (tmp_path / "flow.py").write_text("print('done')")
    argv = [sys.executable, str(tmp_path / "flow.py"), "step"]
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    step = StepServer([module]).start(argv, env=dict(os.environ), **PIPES)
    assert isinstance(step, subprocess.Popen)
    assert step.communicate()[0] == b"done\n"
