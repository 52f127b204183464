"""Read the state of flows that are deployed to AWS Step Functions."""

import re
from typing import Any

from metaflow.metaflow_config import SFN_STATE_MACHINE_PREFIX
from metaflow.plugins.aws.aws_client import get_aws_client
from metaflow.plugins.aws.step_functions.event_bridge_client import EventBridgeClient

from deployment.deployed_flow import DEPLOYED, DeployedFlow
from deployment.deployment import Deployment, deployed_name
from ppo_core.errors import StorageError, library_errors

TAG = re.compile(r"--tag (\w+):([\w.-]+)")
"""Pattern of a tag in the command of a job."""

TOKEN = re.compile(r'"metaflow\.production_token": *"([^"]+)"')
"""Pattern of Metaflow's production token in the definition of a state machine."""

NEXT_MOVE = (
    "Check that your credentials and region belong to the deployment, and that you may read "
    "state machines, their executions, and rules of EventBridge."
)


class StepFunctionsScheduler:
    """The flows of a deployment on AWS Step Functions."""

    def __init__(self, deployment: Deployment) -> None:
        """Store the deployment; the AWS configuration selects the account and the region."""
        self._deployment = deployment

    def name_of(self, flow: str) -> str:
        """Return the name of the flow's state machine."""
        name = deployed_name(flow, self._deployment.project, self._deployment.branch)
        return f"{SFN_STATE_MACHINE_PREFIX}_{name}" if SFN_STATE_MACHINE_PREFIX else name

    def forbid_overlaps(self, flow: str) -> None:
        """Do nothing: Step Functions cannot forbid overlapping runs.

        The lease of the registered model still prevents two runs from training at the same time.
        """

    def find(self, flow: str) -> DeployedFlow | None:
        """Return the deployed flow; None if it is not deployed.

        Raises:
            StorageError: AWS does not answer.
        """
        name = self.name_of(flow)
        with library_errors(StorageError, "Step Functions cannot be read", NEXT_MOVE):
            client = get_aws_client("stepfunctions")
            machines = client.get_paginator("list_state_machines").paginate()
            arns = {
                one["name"]: one["stateMachineArn"]
                for page in machines
                for one in page["stateMachines"]
            }
            if name not in arns:
                return None
            machine = client.describe_state_machine(stateMachineArn=arns[name])
            last = _newest_run(client, arns[name])
            running = _newest_run(client, arns[name], statusFilter="RUNNING")
            cron = _cron_of(name)
        tags = dict(TAG.findall(machine["definition"]))
        return DeployedFlow(
            name=name,
            # AWS does not say when a state machine was updated, so a tag has this time. A tag has
            # dots instead of colons.
            deployed_at=tags.get(DEPLOYED, "").replace(".", ":") or str(machine["creationDate"]),
            tags=tags,
            token=token[1] if (token := TOKEN.search(machine["definition"])) else "",
            cron=cron,
            last_run=last["name"] if last else "",
            result=f"{last['status']}, {last.get('stopDate') or last['startDate']}" if last else "",
            running=running["name"] if running else "",
        )


def _newest_run(client: Any, arn: str, **chosen: str) -> Any | None:
    """Return the newest execution of a state machine; None if there is none."""
    runs = client.list_executions(stateMachineArn=arn, maxResults=1, **chosen)["executions"]
    return runs[0] if runs else None


def _cron_of(state_machine: str) -> str:
    """Return the cron times at which EventBridge starts a state machine.

    Return an empty string if the state machine has no schedule or its schedule is disabled.
    """
    events: Any = get_aws_client("events")
    try:
        rule = events.describe_rule(Name=EventBridgeClient(state_machine).name)
    except events.exceptions.ResourceNotFoundException:
        return ""
    enabled = rule["State"] == "ENABLED"
    return rule["ScheduleExpression"].removeprefix("cron(").removesuffix(")") if enabled else ""
