"""Prepare the environment of the steps: quiet libraries, and a user name for Metaflow."""

import atexit
import gc
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from metaflow.util import get_username

from ppo_core.distributed.process import name_log_levels, quiet_libraries
from ppo_core.errors.redacted_output import install_redaction
from ppo_core.models.kernels.cpu_memory import keep_few_compiled_matmuls

DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    # Without this variable, MLflow prints two lines at the end of every step.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow gives up after 14 seconds with 3 retries, and after minutes with its default of 7.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    # A redirect would send settings and texts to an address that the user did not choose.
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Without this variable, Metaflow prints that pylint is not installed.
    "METAFLOW_PYLINT": "false",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def runs_remotely() -> bool:
    """Return whether Metaflow has started this process on a machine of AWS Batch or Kubernetes."""
    return os.environ.get("METAFLOW_RUNTIME_ENVIRONMENT", "local") != "local"


def prepare_environment() -> None:
    """Redact the output, and set default environment variables, which child processes inherit.

    An import of the project changes nothing in a process. Instead, each command, and the process of
    each step of a flow, calls this function. Metaflow refuses to run as root or without a user
    name, so USERNAME is set in these cases.
    """
    install_redaction()
    quiet_libraries()
    name_log_levels()
    # On other machines, Metaflow starts a task with the command `python`. With the folder of this
    # interpreter first in PATH, `python` is this interpreter.
    folder, search = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if search.split(os.pathsep)[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, search])
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    keep_few_compiled_matmuls()
    # Skip the garbage collection at exit: the process frees all its memory anyway.
    atexit.register(gc.freeze)
    if get_username() is None:
        os.environ["USERNAME"] = "rlhf"


def run_and_exit(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command with the arguments of this process, and exit with its exit code.

    If the program that reads the output has ended, as in `COMMAND | head`, exit with code 1.
    """
    prepare_environment()
    try:
        try:
            code = main(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        # At exit, Python writes the rest of the output, which would fail again on the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _has_lost_its_reader(pipe: int) -> bool:
    """Return whether the program that reads a pipe has ended or closed it."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
