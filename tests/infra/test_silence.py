"""The state machine that says that the flow Retrain has not started, executed by moto."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

import boto3
import pytest
from moto.stepfunctions.parser.asl.component.state.choice.comparison.operator import (
    implementations,
)
from moto.stepfunctions.parser.asl.component.state.exec.state_task.service import (
    state_task_service_aws_sdk,
)

from tests.helpers.aws.moto_gaps import execute_machines
from tests.helpers.aws.stacks import ACCOUNT, REGION, Cloud, cloud, parameters

ROLE = f"arn:aws:iam::{ACCOUNT}:role/any"
NOTHING = json.dumps({"StartAt": "End", "States": {"End": {"Type": "Succeed"}}})


SHAPES = boto3.client("stepfunctions", region_name=REGION).meta.service_model.operation_model(
    "ListExecutions"
)


def to_moto(task: Any, words: Any, *more: Any) -> None:
    """Rename StateMachineArn to stateMachineArn, which moto does for few services."""
    task._to_boto_request(words, SHAPES.input_shape)


def from_moto(task: Any, reply: Any, *more: Any) -> None:
    """Rename the names of the reply back, and write its times as texts, as Step Functions does."""
    task._from_boto_response(reply, SHAPES.output_shape)
    for one in reply["Executions"]:
        for name in {"StartDate", "StopDate"} & one.keys():
            one[name] = one[name].isoformat()


def read_time(text: str) -> datetime | None:
    """Read a time as Step Functions does; moto reads none with fractions of a second."""
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None


@pytest.fixture(scope="module")
def executing() -> Iterator[Cloud]:
    """A cloud with the stacks, where the machine waits for a second and not for ten days."""
    with cloud() as made, ExitStack() as stack:
        values = parameters() | {"SilentSeconds": "1"}
        made.create("rlhf", values | {"Certificate": made.certificate(values["Domain"])})
        states = made.client("stepfunctions")
        (found,) = states.list_state_machines()["stateMachines"]
        machine = states.describe_state_machine(stateMachineArn=found["stateMachineArn"])
        sdk = state_task_service_aws_sdk.StateTaskServiceAwsSdk
        stack.enter_context(patch.object(sdk, "_normalise_parameters", to_moto))
        stack.enter_context(patch.object(sdk, "_normalise_response", from_moto))
        times = implementations.is_operator.IsTimestamp
        stack.enter_context(patch.object(times, "string_to_timestamp", staticmethod(read_time)))
        # moto gives a path with an index as a list of one value.
        later = implementations.timestamp_operators.TimestampGreaterThanEqualsPath
        compare = later._compare
        of_first = staticmethod(lambda found, time: compare(*found, time))
        stack.enter_context(patch.object(later, "_compare", of_first))
        # What executes machines in moto does not know those of CloudFormation.
        for change in execute_machines({"AWS_ENDPOINT_URL_S3": made.url}):
            stack.enter_context(change)
        states.create_state_machine(
            name=machine["name"], definition=machine["definition"], roleArn=machine["roleArn"]
        )
        yield made


def watch(on: Cloud, since: str) -> list[str]:
    """Execute the machine as its schedule does; return the alarms in the queue."""
    states = on.client("stepfunctions")
    machines = states.list_state_machines()["stateMachines"]
    (arn,) = [one["stateMachineArn"] for one in machines if "Silence" in one["name"]]
    started = states.start_execution(stateMachineArn=arn, input=json.dumps({"time": since}))
    deadline = time.monotonic() + 60
    while True:
        found = states.describe_execution(executionArn=started["executionArn"])
        if found["status"] != "RUNNING":
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert found["status"] == "SUCCEEDED", found
    queue = on.client("sqs")
    messages = queue.receive_message(
        QueueUrl=on.outputs("rlhf")["AlarmQueue"], MaxNumberOfMessages=10
    )
    for message in messages.get("Messages", []):
        queue.delete_message(
            QueueUrl=on.outputs("rlhf")["AlarmQueue"], ReceiptHandle=message["ReceiptHandle"]
        )
    return [json.loads(one["Body"])["Message"] for one in messages.get("Messages", [])]


def test_only_silence_raises_an_alarm(executing: Cloud):
    states = executing.client("stepfunctions")
    name = parameters()["RetrainMachine"]
    machine = states.create_state_machine(name=name, definition=NOTHING, roleArn=ROLE)
    assert machine["stateMachineArn"].endswith(f"{REGION}:{ACCOUNT}:stateMachine:{name}")
    before = seconds_from_now(-60)
    assert watch(executing, before) == [f"The flow Retrain has not started since {before}."]
    states.start_execution(stateMachineArn=machine["stateMachineArn"])
    assert watch(executing, before) == []
    after = seconds_from_now(60)
    assert watch(executing, after) == [f"The flow Retrain has not started since {after}."]


def seconds_from_now(seconds: int) -> str:
    """A time as EventBridge writes it into its events."""
    return f"{datetime.now(UTC) + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"
