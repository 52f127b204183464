"""Three gaps of moto's Step Functions, without which it executes no machine that Metaflow made."""

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import boto3
from moto.core.config import default_user_config
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import (
    state_task_service_batch,
)
from moto.stepfunctions.parser.asl.utils import json_path
from moto.stepfunctions.parser.models import StepFunctionsParserBackend


def execute_machines(store: Mapping[str, str]) -> list[Any]:
    """Return the changes to moto by which its Step Functions executes machines.

    Args:
        store: environment of the clients of moto's S3.
    """
    batch = state_task_service_batch.StateTaskServiceBatch
    return [
        patch.dict(default_user_config, stepfunctions={"execute_state_machine": True}),
        # Where moto's Step Functions finds moto's AWS Batch.
        patch.dict(os.environ, MOTO_PORT=store["AWS_ENDPOINT_URL_S3"].rsplit(":")[-1]),
        patch.object(batch, "_normalise_parameters", _to_batch),
        patch.object(batch, "_normalise_response", _from_batch),
        patch.object(json_path, "parse", _parse_with_fields),
        patch.object(StepFunctionsParserBackend, "start_execution", _start_with_name),
    ]


def _to_batch(task: Any, parameters: Any) -> None:
    """Rename JobName of Step Functions to jobName of AWS Batch, and all others so."""
    task._to_boto_request(parameters, _operation("SubmitJob").input_shape)


def _from_batch(task: Any, response: Any, service_action_name: str = "submit_job") -> None:
    """Rename jobName of AWS Batch to JobName of Step Functions, and all others so."""
    operation = {"submit_job": "SubmitJob", "describe_jobs": "DescribeJobs"}[service_action_name]
    task._from_boto_response(response, _operation(operation).output_shape)


def _operation(name: str) -> Any:
    client = boto3.client("batch", region_name="us-east-1")
    return client.meta.service_model.operation_model(name)


_parse = json_path.parse


def _parse_with_fields(path: str) -> Any:
    """Return the expression of a JSONPath; `$.['a','b']` gives an object of those two fields."""
    if not path.startswith("$.['"):
        return _parse(path)
    names = [name.strip(" '") for name in path.removeprefix("$.[").removesuffix("]").split(",")]

    def find(data: Mapping[str, Any]) -> list[Any]:
        fields = {name: data[name] for name in names if name in data}
        return [SimpleNamespace(value=fields, path=None, context=None)]

    return SimpleNamespace(find=find)


_start = StepFunctionsParserBackend.start_execution


def _start_with_name(
    backend: Any, machine: str, name: str | None = None, *values: Any, **named: Any
) -> Any:
    """Start an execution, whose name is made up here if it has none."""
    return _start(backend, machine, name or str(uuid4()), *values, **named)
