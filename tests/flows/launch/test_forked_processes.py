"""Programs that a step forks behave as programs that the step starts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer

import psutil
import pytest

from metaflow_glue.forked_steps import CardServer, StepServer
from pipeline.launch import process_tree
from pipeline.launch.forked_processes import (
    ForkedProcess,
    ForkServer,
    start_python,
    used_by_children,
)
from pipeline.launch.launcher import train
from ppo_core.errors import ProcessError
from tests.helpers.paths import ROOT

JOB = """
import json, os, sys
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[:2], "folder": os.getcwd(),
    "parent": os.getppid(), "given parent": os.environ.get("PPO_CORE_PARENT"),
    "has imported": "colorsys" in sys.modules,
}), flush=True)
exec(sys.argv[1])
"""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """Give this process a fork server, and an importable module `job`."""
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = ForkServer.start(["colorsys"])
    monkeypatch.setattr(ForkServer, "of_this_process", server)
    yield server
    server.close()


def run_job(
    code: str, capfd: pytest.CaptureFixture[str], **environment: str
) -> tuple[subprocess.Popen[bytes] | ForkedProcess, int, dict[str, object], str]:
    """Run a job; return its process, exit code, first line, and the rest of its output."""
    process = start_python([sys.executable, "-m", "job", code], {**os.environ, **environment})
    exit_code = process.wait()
    first, _, rest = capfd.readouterr().out.partition("\n")
    return process, exit_code, json.loads(first), rest


WORK = """
import time
kept = bytearray(b"x") * 200_000_000
end = time.process_time() + 0.3
while time.process_time() < end: pass
"""


def test_what_forked_processes_used_is_counted(server, capfd):
    before = used_by_children()
    for _ in range(2):
        run_job(WORK, capfd)
    after = used_by_children()
    assert 0.6 <= (after.cpu_microseconds - before.cpu_microseconds) / 1e6 < 5
    assert 200_000_000 <= server.used.peak_rss_bytes < 1_000_000_000
    assert after.peak_rss_bytes >= server.used.peak_rss_bytes


def test_a_forked_module_runs_as_python_runs_it(server, tmp_path: Path, capfd):
    process, code, found, rest = run_job("print('end')", capfd, PPO_CORE_PARENT=str(os.getpid()))
    assert isinstance(process, ForkedProcess)
    assert (code, rest) == (0, "end\n")
    assert found.pop("argv") == [str(tmp_path / "job.py"), "print('end')"]
    assert found.pop("given parent") == str(found.pop("parent"))
    assert found == {
        "name": "__main__",
        "path": [os.getcwd(), str(tmp_path)],
        "folder": os.getcwd(),
        "has imported": True,
    }


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit('a message')", 1),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), 9)", -9),
        ("from threading import Timer; Timer(1, lambda: print('later')).start()", 0),
    ],
)
def test_a_forked_program_ends_as_python_ends_it(server, capfd, program: str, code: int):
    forked = run_job(program, capfd)
    plain = subprocess.run(
        [sys.executable, "-m", "job", program], capture_output=True, check=False, text=True
    )
    assert isinstance(forked[0], ForkedProcess)
    assert forked[1] == plain.returncode == code
    assert forked[3] == plain.stdout.partition("\n")[2]


def test_files_that_a_program_leaves_open_are_written(server, tmp_path: Path, capfd):
    # A module keeps its file until the end, unlike the main module. The exit function is that of
    # `prepare_environment`.
    code = "import atexit, gc; file = open({!r}, 'w'); file.write('all of it'); {}"
    for name, more in (("one", ""), ("two", "atexit.register(gc.freeze)")):
        (tmp_path / f"{name}.py").write_text(code.format(str(tmp_path / f"{name}.txt"), more))
        assert run_job(f"import {name}", capfd)[1] == 0
        assert (tmp_path / f"{name}.txt").read_text() == "all of it"


def test_a_signal_that_arrives_at_the_start_ends_the_program(server):
    argv = [sys.executable, "-m", "job", "import time; time.sleep(20)"]
    for _ in range(20):
        process = start_python(argv, os.environ)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_a_module_of_the_user_is_found_before_one_of_the_flows(tmp_path: Path, monkeypatch):
    for name in ("job", "pipeline"):
        (tmp_path / f"{name}.py").write_text("import pipeline; print(pipeline.__file__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server, read = ForkServer.start(["pipeline.launch.commands"]), tmp_path / "output"
    with read.open("w") as output:
        streams = {"output": output.fileno(), "error": output.fileno()}
        assert server.fork(["-m", "job"], os.environ, **streams).wait() == 0
    server.close()
    assert {*read.read_text().split()} == {str(tmp_path / "pipeline.py")}


def test_a_program_that_needs_other_threads_is_a_new_process(server, capfd):
    process, _, found, _ = run_job("", capfd, OMP_NUM_THREADS="7")
    assert isinstance(process, subprocess.Popen)
    assert not found["has imported"]


def test_a_step_with_fewer_threads_is_a_new_process(tmp_path: Path):
    (tmp_path / "flow.py").write_text("")
    server = StepServer([])
    environment = {**os.environ, "OMP_NUM_THREADS": "7"}
    step = server.start([sys.executable, str(tmp_path / "flow.py"), "step"], env=environment)
    assert isinstance(step, subprocess.Popen)
    assert step.wait() == 0
    server.close()


def test_a_server_ends_with_a_client_that_ends_during_the_imports(tmp_path: Path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    code = (
        "import os, psutil, time\n"
        "from pipeline.launch.forked_processes import ForkServer\n"
        "ForkServer.start(['slow'])\n"
        "(server,) = psutil.Process().children()\n"
        "time.sleep(2); print(server.pid, flush=True)"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "flows"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment)
    with suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(int(printed))], 5)
        assert psutil.Process(int(printed)).status() == psutil.STATUS_ZOMBIE


def test_a_frozen_server_ends_its_training(server, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(process_tree, "FROZEN_LOOKS", 3)
    (tmp_path / "hanging.py").write_text("import time; time.sleep(60)")
    freezer = Timer(2, lambda: _server_of_this_process().suspend())
    freezer.start()
    with pytest.raises(ProcessError, match="was frozen"):
        train(tmp_path / "job.json", processes=1, program=("hanging",))


def _server_of_this_process() -> psutil.Process:
    (server,) = (
        each for each in psutil.Process().children() if "fork_server" in str(each.cmdline())
    )
    return server


def test_without_a_server_a_new_process_is_started(server, monkeypatch, capfd):
    monkeypatch.setattr(ForkServer, "of_this_process", None)
    assert isinstance(run_job("", capfd)[0], subprocess.Popen)


def test_a_step_forks_programs_after_it_has_used_threads(tmp_path: Path):
    product = "torch.ones(900, 900).mm(torch.ones(900, 900))"
    (tmp_path / "job.py").write_text(f"import torch; print({product}[0, 0])")
    (tmp_path / "flow.py").write_text(
        "import os, sys, torch\n"
        "from pipeline.launch.forked_processes import ForkedProcess, start_python\n"
        "torch.set_num_threads(2)\n"
        f"{product}\n"
        "for _ in range(2):\n"
        "    job = start_python([sys.executable, '-m', 'job'], dict(os.environ))\n"
        "    assert isinstance(job, ForkedProcess) and job.wait() == 0\n"
    )
    server = StepServer(["torch"])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    step = server.start([sys.executable, str(tmp_path / "flow.py"), "step"], env=environment)
    assert step.stdout.read() == b"tensor(900.)\n" * 2, step.stderr.read()
    assert step.wait() == 0
    server.close()


@pytest.mark.parametrize("victim", ["step", "its server"])
def test_a_program_ends_with_its_step_and_with_its_server(tmp_path: Path, victim: str):
    (tmp_path / "job.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    (tmp_path / "flow.py").write_text(
        "import os, sys\n"
        "from pipeline.launch.forked_processes import start_python\n"
        "print(start_python([sys.executable, '-m', 'job'], dict(os.environ)).wait(), flush=True)\n"
    )
    server = StepServer([])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    step = server.start([sys.executable, str(tmp_path / "flow.py"), "step"], env=environment)
    assert step.stdout.readline() == b"begun\n"
    own_server, job = psutil.Process(step.pid).children(recursive=True)
    assert job.ppid() == own_server.pid
    (psutil.Process(step.pid) if victim == "step" else own_server).kill()
    assert step.wait() == (-signal.SIGKILL if victim == "step" else 0)
    if victim == "its server":
        assert step.stdout.read() == b"-9\n"
    psutil.wait_procs([job], 20)
    assert not job.is_running()
    server.close()


def test_the_output_of_a_card_program_is_returned_with_its_errors(server):
    argv = [sys.executable, "-m", "job", "print('one'); print('two', file=sys.stderr)"]
    output = CardServer(server).check_output(argv, env=os.environ, stderr=subprocess.STDOUT)
    assert output.splitlines()[1:] == [b"one", b"two"]
    with pytest.raises(subprocess.CalledProcessError) as error:
        CardServer(server).check_output([*argv[:-1], "print('why'); sys.exit(2)"], env=os.environ)
    assert (error.value.returncode, error.value.output.splitlines()[1:]) == (2, [b"why"])


def test_a_card_program_that_takes_too_long_is_killed(server, tmp_path: Path):
    file = str(tmp_path / "pid")
    code = f"import time; open({file!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    argv = [sys.executable, "-m", "job", code]
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        CardServer(server).check_output(argv, env=os.environ, timeout=3)
    assert time.monotonic() - started < 20
    time.sleep(0.2)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_without_its_server_a_card_program_is_started(server):
    server.close()
    argv = [sys.executable, "-c", "print('one')"]
    assert CardServer(server).check_output(argv, env=os.environ) == b"one\n"
