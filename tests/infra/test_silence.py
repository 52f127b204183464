"""The state machine that says that the flow Retrain has not started, executed by moto."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.helpers.cloud import ACCOUNT, REGION, Cloud, cloud, parameters
from tests.helpers.moto_gaps import execute_machines

ROLE = f"arn:aws:iam::{ACCOUNT}:role/any"
NOTHING = json.dumps({"StartAt": "End", "States": {"End": {"Type": "Succeed"}}})


@pytest.fixture(scope="module")
def executing() -> Iterator[Cloud]:
    """A cloud with the stacks, where the machine waits for a second and not for ten days."""
    with cloud() as made, ExitStack() as stack:
        for change in execute_machines({"AWS_ENDPOINT_URL_S3": made.url}):
            stack.enter_context(change)
        values = parameters() | {"SilentSeconds": "1"}
        made.create("rlhf", values | {"Certificate": made.certificate(values["Domain"])})
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


def test_silence_raises_an_alarm_and_a_run_none(executing: Cloud):
    states = executing.client("stepfunctions")
    name = parameters()["RetrainMachine"]
    machine = states.create_state_machine(name=name, definition=NOTHING, roleArn=ROLE)
    assert machine["stateMachineArn"].endswith(f"{REGION}:{ACCOUNT}:stateMachine:{name}")
    never = watch(executing, "2026-01-01T00:00:00Z")
    assert never == ["The flow Retrain has not started since 2026-01-01T00:00:00Z."]
    states.start_execution(stateMachineArn=machine["stateMachineArn"])
    assert watch(executing, "2026-01-01T00:00:00Z") == []
    late = watch(executing, "2999-01-01T00:00:00Z")
    assert late == ["The flow Retrain has not started since 2999-01-01T00:00:00Z."]
