"""AWS Batch of a test: each job is a process in an empty folder of its own, deleted at its end.

moto's AWS Batch starts nothing. Here the command of a job runs as in a container: it finds nothing
of another job, and nothing that it leaves remains. Jobs share S3 and the servers named in their
environment, and nothing else.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from moto.batch.responses import BatchResponse
from moto.batch_simple.models import BatchSimpleBackend
from moto.core.config import default_user_config

QUEUE = "queue"
MACHINES = "machines"


@dataclass(frozen=True)
class Job:
    """One attempt of a job, which has ended."""

    step: str
    attempt: int
    """Number of the attempt, from 1."""

    execution: str
    """Name of the execution of the state machine that the job belongs to."""

    folder: Path
    """Folder that the job had, with its working folder, home and temporary folder."""

    exit_code: int
    log: str
    seconds: float

    revisited: list[Path]
    """Folders of ended jobs that this one made again, at a path that it found in an artifact."""


@dataclass
class BatchJobs:
    """Runs the jobs that are submitted to moto's AWS Batch."""

    variables: Mapping[str, str]
    """Environment of all jobs, beside what Metaflow and AWS Batch put there."""

    ended: list[Job] = field(default_factory=list)
    """All attempts of all jobs, in the order of their ends."""

    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def patches(self) -> list[Any]:
        """Return the changes to moto by which each job runs before its submission is answered."""
        submit = BatchResponse.submitjob

        def submit_and_run(request: BatchResponse) -> str:
            answer = submit(request)
            job = request.batch_backend._jobs[json.loads(answer)["jobId"]]
            # moto's AWS Batch does not read it.
            strategy = request._get_param("retryStrategy") or {}
            job._mark_stopped(success=self.run(job, strategy.get("attempts", 1)))
            return answer

        # moto calls it in the place of running the job.
        def register(backend: Any, include_start_attempt: bool, job: Any) -> None:
            backend.backend._jobs[job.job_id] = job

        return [
            patch.dict(default_user_config, batch={"use_docker": False}),
            patch.object(BatchResponse, "submitjob", submit_and_run),
            patch.object(BatchSimpleBackend, "_mark_job_as_finished", register),
        ]

    def run(self, job: Any, attempts: int) -> bool:
        """Run a job of moto until an attempt succeeds; return whether one did."""
        for attempt in range(1, attempts + 1):
            job._start_attempt()
            self.ended.append(self._run_attempt(job, attempt))
            if self.ended[-1].exit_code == 0:
                return True
        return False

    def kill(self) -> None:
        """Kill all jobs that still run."""
        for process in self.running:
            _kill(process)

    def _run_attempt(self, job: Any, attempt: int) -> Job:
        given = job._get_container_property("environment", [])
        environment = {each["name"]: each["value"] for each in given}
        # A process that outlives its job by a moment may write while the folder is being deleted.
        with TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as name:
            folder, started = Path(name), time.monotonic()
            for part in ("work", "home", "tmp"):
                (folder / part).mkdir()
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    job._get_container_property("command", []),
                    cwd=folder / "work",
                    env={
                        **_container_variables(folder, attempt),
                        **self.variables,
                        **environment,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.running.append(process)
            exit_code = process.wait()
            self.running.remove(process)
            # Nothing in a container outlives its first process.
            _kill(process)
            return Job(
                step=job.parameters["metaflow.step_name"],
                attempt=attempt,
                execution=environment["METAFLOW_RUN_ID"],
                folder=folder,
                exit_code=exit_code,
                log=(folder / "log").read_text(errors="replace"),
                seconds=time.monotonic() - started,
                revisited=self._delete_revisited(),
            )

    def _delete_revisited(self) -> list[Path]:
        """Delete the folders of ended jobs that are there again, which later jobs would share."""
        folders = [job.folder for job in self.ended if job.folder.exists()]
        for folder in folders:
            shutil.rmtree(folder)
        return folders


def _container_variables(folder: Path, attempt: int) -> dict[str, str]:
    """Return what the image and AWS Batch put in the environment of a container.

    The python is that of this process, whose installed packages stand for the image's. PYTHONPATH
    is not set, so the project itself comes from Metaflow's code package.
    """
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "METAFLOW_SKIP_INSTALL_DEPENDENCIES": "1",
        "METAFLOW_S3_WORKER_COUNT": "2",
        "AWS_BATCH_JOB_ATTEMPT": str(attempt),
        "AWS_BATCH_CE_NAME": MACHINES,
        "AWS_BATCH_JQ_NAME": QUEUE,
        "AWS_EXECUTION_ENV": "AWS_ECS_FARGATE",
    }


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
