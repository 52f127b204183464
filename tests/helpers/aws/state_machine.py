"""Step Functions of a test: a flow is deployed to moto, which executes its state machine.

Each step runs in an empty folder of its own; see `batch_jobs`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import boto3
from moto.batch.models import batch_backends
from moto.events.models import events_backends
from moto.iam.models import iam_backends
from moto.secretsmanager.models import secretsmanager_backends
from moto.stepfunctions.parser.models import stepfunctions_parser_backends

from tests.helpers.aws.batch_jobs import MACHINES, QUEUE, BatchJobs, Job
from tests.helpers.aws.moto_gaps import execute_machines
from tests.helpers.paths import ROOT
from tests.helpers.runs.scheduled_flow import deployment_variables
from tests.helpers.servers.servers import s3

ROLES = "arn:aws:iam::123456789012:role"

POLL = 0.1
"""Seconds between two questions whether an execution has ended."""


@dataclass(frozen=True)
class Execution:
    """The end of an execution."""

    name: str
    status: str
    """SUCCEEDED, FAILED, TIMED_OUT or ABORTED."""

    jobs: list[Job]
    """All attempts of all jobs, in the order of their ends."""


@dataclass
class StateMachines:
    """Deploys flows to moto's Step Functions and executes them."""

    variables: Mapping[str, str]
    """Environment of a command that deploys a flow."""

    jobs: BatchJobs

    def client(self, service: str) -> Any:
        """Return a client of one of moto's services."""
        return boto3.client(
            service,
            endpoint_url=self.variables["AWS_ENDPOINT_URL"],
            region_name=self.variables["AWS_DEFAULT_REGION"],
            aws_access_key_id=self.variables["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.variables["AWS_SECRET_ACCESS_KEY"],
        )

    def execute(
        self, flow: Path, *arguments: str | Path, parameters: Mapping[str, object] | None = None
    ) -> Execution:
        """Deploy the flow in the file `flow`, start it and wait for its end.

        Args:
            flow: file of the flow.
            arguments: options before `step-functions create`, such as `--config settings FILE`.
            parameters: values of the flow's parameters, by their names on the command line.
        """
        return self.start(self.create(flow, *arguments), parameters)

    def create(self, flow: Path, *arguments: str | Path) -> str:
        """Deploy the flow in the file `flow`, and return the ARN of its state machine."""
        name = f"machine-{uuid4()}"
        ended = subprocess.run(
            [sys.executable, flow, *arguments, *f"step-functions --name {name} create".split()],
            # Metaflow packages what the flow imports, which is to be of this checkout.
            env={**os.environ, **self.variables, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return self.machine(name)

    def deploy(self, file: Path) -> None:
        """Deploy both flows as a deployment file says, with the command of a user."""
        ended = subprocess.run(
            [sys.executable, ROOT / "flows/deploy.py", file, "--create"],
            env={**os.environ, **self.variables, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def machine(self, name: str) -> str:
        """Return the ARN of the state machine with this name."""
        machines = self.client("stepfunctions").list_state_machines()["stateMachines"]
        return next(one["stateMachineArn"] for one in machines if one["name"] == name)

    def start(
        self, machine: str, parameters: Mapping[str, object] | None = None, seconds: float = 1200
    ) -> Execution:
        """Start a state machine and wait for its end.

        Args:
            machine: ARN of the state machine.
            parameters: values of the flow's parameters, by their names on the command line.
            seconds: an execution that takes longer is an error.
        """
        return self.wait(self.trigger(machine, parameters), seconds)

    def trigger(self, machine: str, parameters: Mapping[str, object] | None = None) -> str:
        """Start a state machine as a schedule does, and return the ARN of the execution."""
        words = json.dumps({"Parameters": json.dumps(dict(parameters or {}))})
        client = self.client("stepfunctions")
        return client.start_execution(stateMachineArn=machine, input=words)["executionArn"]

    def wait(self, execution: str, seconds: float = 1200) -> Execution:
        """Wait for the end of the execution with this ARN."""
        client, deadline = self.client("stepfunctions"), time.monotonic() + seconds
        name = execution.split(":")[-1]
        while (status := client.describe_execution(executionArn=execution)["status"]) == "RUNNING":
            assert time.monotonic() < deadline, f"{name} runs for more than {seconds} seconds."
            time.sleep(POLL)
        return Execution(name, status, [one for one in self.jobs.ended if one.execution == name])

    def executions(self, machine: str) -> list[str]:
        """Return the ARNs of the executions of a state machine, in the order of their starts."""
        found = self.client("stepfunctions").list_executions(stateMachineArn=machine)
        by_start = sorted(found["executions"], key=lambda one: one["startDate"])
        return [one["executionArn"] for one in by_start]


@contextmanager
def state_machines(job_variables: Mapping[str, str] | None = None) -> Iterator[StateMachines]:
    """Run moto with S3, IAM, AWS Batch and Step Functions while the context lasts.

    Args:
        job_variables: further environment of the jobs, such as MLFLOW_TRACKING_URI.
    """
    # moto keeps what an earlier context of this process made.
    for backends in (
        iam_backends,
        batch_backends,
        stepfunctions_parser_backends,
        events_backends,
        secretsmanager_backends,
    ):
        for account in backends.values():
            account.reset()
    with s3() as store, TemporaryDirectory() as home, ExitStack() as patches:
        variables = _deployment_variables(store, home)
        # The keys stand for the role of a job.
        keys = {name: text for name, text in variables.items() if name.startswith("AWS_")}
        machines = StateMachines(variables, BatchJobs({**keys, **(job_variables or {})}))
        job_queue(machines)
        for each in (*execute_machines(store), *machines.jobs.patches()):
            patches.enter_context(each)
        try:
            yield machines
        finally:
            machines.jobs.kill()


def _deployment_variables(store: Mapping[str, str], home: str) -> dict[str, str]:
    return {
        **deployment_variables(store, Path(home)),
        "METAFLOW_S3_WORKER_COUNT": "2",
        "METAFLOW_BATCH_JOB_QUEUE": QUEUE,
        # Metaflow refuses to deploy as root.
        "METAFLOW_USER": "tester",
        "METAFLOW_ECS_S3_ACCESS_IAM_ROLE": f"{ROLES}/batch",
        "METAFLOW_ECS_FARGATE_EXECUTION_ROLE": f"{ROLES}/fargate",
        "METAFLOW_SFN_IAM_ROLE": f"{ROLES}/step-functions",
        "METAFLOW_EVENTS_SFN_ACCESS_IAM_ROLE": f"{ROLES}/schedule",
    }


def job_queue(machines: StateMachines) -> None:
    """Make a queue of AWS Batch, whose kind of machines Metaflow looks up."""
    role = machines.client("iam").create_role(RoleName="batch", AssumeRolePolicyDocument="{}")
    subnets = machines.client("ec2").describe_subnets()["Subnets"]
    groups = machines.client("ec2").describe_security_groups()["SecurityGroups"]
    batch = machines.client("batch")
    environment = batch.create_compute_environment(
        computeEnvironmentName=MACHINES,
        type="MANAGED",
        state="ENABLED",
        serviceRole=role["Role"]["Arn"],
        computeResources={
            "type": "FARGATE",
            "maxvCpus": 4,
            "subnets": [subnets[0]["SubnetId"]],
            "securityGroupIds": [groups[0]["GroupId"]],
        },
    )["computeEnvironmentArn"]
    order = [{"order": 1, "computeEnvironment": environment}]
    batch.create_job_queue(
        jobQueueName=QUEUE, state="ENABLED", priority=1, computeEnvironmentOrder=order
    )
