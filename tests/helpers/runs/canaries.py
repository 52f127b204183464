"""Runs of our commands with canaries for secrets, and a search for them in what a run left."""

import gzip
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT

CANARY = "canaryQx"
"""Part of every secret of these tests."""

VARIABLES = {
    "OPENAI_API_KEY": f"sk-{CANARY}0judge0key0123",
    "HF_TOKEN": f"hf_{CANARY}HubToken0123456",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}aws/Secret+0123",
    "DATABASE_URL": f"postgresql://me:{CANARY}db@127.0.0.1:1/db",
    "SERVICE_PASSWORD": f"{CANARY} service password",
}
"""Secrets in the environment of every run."""

TRACKING_URI = f"http://me:{CANARY}mlflow@127.0.0.1:1"
"""Address of an MLflow server that does not answer."""

REMOTE = f"https://x-access-token:{CANARY}git@host/project.git"


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    log: str
    folder: Path
    """Working directory, with all stores of MLflow and Metaflow."""

    def leaks(self) -> list[str]:
        """Names of the channels that hold a canary."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        found = [str(path.relative_to(self.folder)) for path in files if _holds_canary(path)]
        return found + ["output"] * (CANARY in self.log)


def copy_project(folder: Path) -> Path:
    """A clone of the project as CI jobs have it, with a token in the address of its remote."""
    for package in ("flows", "ppo_core"):
        shutil.copytree(ROOT / package, folder / package)
    author = ("-c", "user.name=me", "-c", "user.email=me@host")
    for words in (["init", "-q"], ["remote", "add", "origin", REMOTE], ["add", "flows"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    subprocess.run(["git", *author, "commit", "-qm", "all"], cwd=folder, check=True)
    return folder


def run_with_canaries(
    project: Path, folder: Path, command: list[str], environment: Mapping[str, str]
) -> Ran:
    """Run `python COMMAND` of a copy of the project in a folder; its first word is a file or -m."""
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    first, *rest = command
    ran = subprocess.run(
        [sys.executable, first if first == "-m" else str(project / first), *rest],
        cwd=folder,
        env=kept
        | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(folder),
            "PYTHONPATH": str(project),
        }
        | VARIABLES
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ran(ran.returncode, ran.stdout + ran.stderr, folder)


def _holds_canary(path: Path) -> bool:
    content = path.read_bytes()
    return any(CANARY.encode() in each for each in (content, _decompressed(content)))


def _decompressed(content: bytes) -> bytes:
    """The content of Metaflow's artifacts, which are compressed; else nothing."""
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return b""
