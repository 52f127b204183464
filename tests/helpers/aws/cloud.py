"""AWS by moto and an MLflow server whose artifacts are in S3: all that jobs share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.helpers.aws.state_machine import StateMachines, state_machines
from tests.helpers.servers.servers import BUCKET, MlflowServer, mlflow_server


@dataclass(frozen=True)
class Cloud:
    """AWS by moto, and an MLflow server whose artifacts are in S3."""

    machines: StateMachines
    server: MlflowServer

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(self.server.url)

    def objects(self, prefix: str) -> list[str]:
        """Keys of the bucket that begin so."""
        pages = self.machines.client("s3").get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=BUCKET, Prefix=prefix).search("Contents[] || `[]`")
        return [each["Key"] for each in found]

    def remove(self, prefix: str) -> None:
        """Remove the objects of the bucket that begin so."""
        for key in self.objects(prefix):
            self.machines.client("s3").delete_object(Bucket=BUCKET, Key=key)

    def upload(self, path: Path, name: str = "") -> str:
        """Store a file or folder as an input, and return its address."""
        name = name or path.name
        for file in [path] if path.is_file() else path.iterdir():
            key = name if path.is_file() else f"{name}/{file.name}"
            self.machines.client("s3").upload_file(str(file), BUCKET, f"data/{key}")
        return f"s3://{BUCKET}/data/{name}"


@contextmanager
def cloud_of(folder: Path) -> Iterator[Cloud]:
    """Run the servers while the context lasts; this process reads MLflow's artifacts, too."""
    with (
        pytest.MonkeyPatch.context() as environment,
        state_machines() as machines,
        mlflow_server(folder, f"s3://{BUCKET}/mlflow", machines.variables) as server,
    ):
        for name, value in machines.variables.items():
            if name.startswith(("AWS_", "MLFLOW_")):
                environment.setenv(name, value)
        machines.jobs.variables = {
            **machines.jobs.variables,
            "MLFLOW_TRACKING_URI": server.url,
            "MLFLOW_S3_ENDPOINT_URL": machines.variables["MLFLOW_S3_ENDPOINT_URL"],
        }
        yield Cloud(machines, server)
