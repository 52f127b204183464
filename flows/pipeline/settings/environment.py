"""The environment of the steps: quiet libraries, and a user for Metaflow."""

import atexit
import gc
import os
import sys
from pathlib import Path

from metaflow.util import get_username

from ppo_core.models.kernels.cpu_memory import keep_few_compiled_matmuls

DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    # Two lines at the end of every step.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Three retries are given up after 14 seconds, MLflow's own seven after four minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment() -> None:
    """Set what is not set already; the processes of the steps inherit it.

    Metaflow refuses to run for root and for nobody, as which a container runs.
    """
    # Metaflow starts the tasks of further machines as `python`.
    folder, search = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if search.split(os.pathsep)[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, search])
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    keep_few_compiled_matmuls()
    # At the end of a process nothing is looked through for garbage: all memory goes back anyway.
    atexit.register(gc.freeze)
    if get_username() is None:
        os.environ["USERNAME"] = "rlhf"
