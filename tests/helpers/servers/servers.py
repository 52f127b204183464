"""Real servers on 127.0.0.1: MLflow, which can be killed and restarted, and moto's S3."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import boto3
import requests
from moto.server import ThreadedMotoServer

from tests.helpers.servers.mlflow_store import write_database

BUCKET = "artifacts"


@dataclass
class MlflowServer:
    """`mlflow server` on a sqlite file, which survives when the server is killed."""

    folder: Path
    artifacts: str
    """Root of all artifacts: a folder, or an s3:// address, which clients write to directly."""

    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=lambda: free_port())
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        database = self.folder / "server.db"
        if not database.exists():
            write_database(database)
        environment = {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            # These are eight slow processes that evaluate traces.
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
                *("--port", str(self.port), "--workers", "1"),
                *("--backend-store-uri", f"sqlite:///{database}"),
                *("--default-artifact-root", self.artifacts),
            ],
            cwd=self.folder,
            env={**os.environ, **self.environment, **environment},
            stdout=(self.folder / "server.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_until_answering(f"{self.url}/health", self.process, self.folder / "server.log")

    def kill(self) -> None:
        """Kill the server with all its workers."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


@contextmanager
def mlflow_server(
    folder: Path, artifacts: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[MlflowServer]:
    """Run a server while the context lasts."""
    server = MlflowServer(folder, artifacts or str(folder / "artifacts"), environment or {})
    server.start()
    try:
        yield server
    finally:
        if server.process is not None:
            server.kill()


@cache
def shared_server() -> MlflowServer:
    """One server for all files of a process that ask for it."""
    folder = Path(tempfile.mkdtemp())
    server = MlflowServer(folder, str(folder / "artifacts"))
    server.start()

    def end() -> None:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return server


@contextmanager
def s3() -> Iterator[dict[str, str]]:
    """Run moto's S3 with the bucket `artifacts`; yield the environment of its clients."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "MLFLOW_S3_ENDPOINT_URL": f"http://{host}:{port}",
    }
    boto3.client(
        "s3",
        endpoint_url=environment["MLFLOW_S3_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    ).create_bucket(Bucket=BUCKET)
    try:
        yield environment
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_answering(
    url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 180
) -> None:
    """Wait until a GET of `url` succeeds; fail with the log if the process has ended."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if requests.get(url, timeout=5).ok:
                return
        except (requests.ConnectionError, requests.Timeout):
            pass
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
