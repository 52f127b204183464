"""Who may do what: each role of the stacks, and each request, allowed and refused."""

from typing import Any

import pytest

from tests.helpers.aws.policies import MISSING, Request, decide, policies_of, policies_on_resources
from tests.helpers.aws.stacks import ACCOUNT, REGION, Cloud, parameters
from tests.infra.conftest import STACK

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ROLES = {
    "retrain": "RetrainRole",
    "train": "TrainRole",
    "judge": "JudgeRole",
    "register": "RegisterRole",
    "consumer": "ConsumerRole",
    "machines": "StepFunctionsRole",
    "schedule": "EventBridgeRole",
    "deploy": "DeployRole",
}
"""Output of the stack with each role."""

STEPS = {"train", "judge", "register"}
"""Roles of the steps of the flow RLHF."""

FLOWS = STEPS | {"retrain"}

READERS = FLOWS | {"deploy"}
"""Roles with the policy that reads the bucket."""

RUN = "mlflow/workspaces/default/1/0123456789abcdef0123456789abcdef/artifacts/samples.json"
MODEL = "mlflow/workspaces/default/1/models/m-0123456789abcdef/artifacts/model/model.safetensors"
SPANS = "mlflow/workspaces/default/2/traces/tr-0123456789abcdef/artifacts/traces.json"
"""Where MLflow keeps the artifacts of a run, the files of a version, and the spans of a trace."""


@pytest.fixture(scope="module")
def cases(deployed: Cloud) -> dict[str, tuple[Request, set[str]]]:
    outputs = deployed.outputs(STACK)
    bucket = f"arn:aws:s3:::{outputs['Bucket']}"
    machines = f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine"
    retrain, training = (parameters()[name] for name in ("RetrainMachine", "TrainingMachine"))
    nobody: set[str] = set()

    def s3(action: str, key: str, **context: str) -> Request:
        return Request(f"s3:{action}", f"{bucket}/{key}", context)

    def listing(prefix: str) -> Request:
        return Request("s3:ListBucket", bucket, {"s3:prefix": prefix})

    def secret(name: str) -> Request:
        return Request("secretsmanager:GetSecretValue", outputs[f"{name}Secret"])

    def states(action: str, name: str) -> Request:
        return Request(f"states:{action}", f"{machines}:{name}")

    def execution(action: str, name: str) -> Request:
        place = f"arn:aws:states:{REGION}:{ACCOUNT}:execution:{name}:1"
        return Request(f"states:{action}", place)

    def rule(action: str, name: str) -> Request:
        return Request(f"events:{action}", f"arn:aws:events:{REGION}:{ACCOUNT}:rule/{name}")

    def passing(role: str, service: str) -> Request:
        receiver = {"iam:PassedToService": f"{service}.amazonaws.com"}
        return Request("iam:PassRole", outputs[role], receiver)

    return {
        "read inputs": (s3("GetObject", "inputs/pairs.jsonl"), READERS),
        "change inputs": (s3("PutObject", "inputs/pairs.jsonl"), nobody),
        "delete inputs": (s3("DeleteObject", "inputs/pairs.jsonl"), nobody),
        "read the store": (s3("GetObject", "metaflow/rlhf/cache/sft/x"), READERS),
        "write results": (s3("PutObject", "metaflow/rlhf/runs/RLHF/1/x"), STEPS),
        "delete old checkpoints": (s3("DeleteObject", "metaflow/rlhf/runs/RLHF/1/x"), STEPS),
        "take or renew the lease": (s3("PutObject", "metaflow/rlhf/leases/m.json"), FLOWS),
        "read artifacts of steps": (s3("GetObject", "metaflow/RLHF/data/ab/abc"), READERS),
        "write artifacts of RLHF": (
            s3("PutObject", "metaflow/RLHF/data/ab/abc"),
            STEPS | {"deploy"},
        ),
        "write cards of RLHF": (s3("PutObject", "metaflow/mf.cards/RLHF/x"), STEPS),
        "write artifacts of Retrain": (
            s3("PutObject", "metaflow/Retrain/data/a"),
            {"retrain", "deploy"},
        ),
        "read a run's artifacts": (s3("GetObject", RUN), READERS),
        "write a run's artifacts": (s3("PutObject", RUN), STEPS),
        "delete a run's artifacts": (s3("DeleteObject", RUN), nobody),
        "read the files of a version": (s3("GetObject", MODEL), READERS | {"consumer"}),
        "write the files of a version": (s3("PutObject", MODEL), {"register"}),
        "delete the files of a version": (s3("DeleteObject", MODEL), nobody),
        "write the spans of an answer": (s3("PutObject", SPANS), STEPS | {"consumer"}),
        "delete for ever": (s3("DeleteObjectVersion", "metaflow/rlhf/runs/x"), nobody),
        "list versions": (
            listing("mlflow/workspaces/default/1/models/m-1/"),
            READERS | {"consumer"},
        ),
        "list the store": (listing("metaflow/rlhf/"), READERS),
        "open the bucket": (Request("s3:PutBucketPolicy", bucket), nobody),
        "write without TLS": (
            s3("PutObject", "metaflow/rlhf/x", **{"aws:SecureTransport": "false"}),
            nobody,
        ),
        "write with an old TLS": (
            s3("PutObject", "metaflow/rlhf/x", **{"s3:TlsVersion": "1.1"}),
            nobody,
        ),
        "write without the key": (
            s3("PutObject", "metaflow/rlhf/x", **{"s3:x-amz-server-side-encryption": "AES256"}),
            nobody,
        ),
        "read the judge's key": (secret("JudgeKey"), {"judge"}),
        "log runs in MLflow": (secret("MlflowTrain"), {"retrain", "train", "judge"}),
        "write MLflow's registry": (secret("MlflowRegister"), {"register"}),
        "read MLflow's registry": (secret("MlflowConsumer"), {"consumer"}),
        "start the training": (states("StartExecution", training), {"retrain", "deploy"}),
        "look at the training": (states("DescribeStateMachine", training), {"retrain", "deploy"}),
        "start Retrain": (states("StartExecution", retrain), {"schedule", "deploy"}),
        "start anything else": (states("StartExecution", "other"), nobody),
        "make a state machine": (states("CreateStateMachine", retrain), {"deploy"}),
        "change a state machine": (states("UpdateStateMachine", training), {"deploy"}),
        "delete a state machine": (states("DeleteStateMachine", retrain), {"deploy"}),
        "change another state machine": (states("UpdateStateMachine", "other"), nobody),
        "stop a run": (execution("StopExecution", training), {"deploy"}),
        "stop another run": (execution("StopExecution", "other"), nobody),
        "change the schedule": (rule("PutRule", retrain), {"deploy"}),
        "delete the schedule": (rule("DeleteRule", retrain), {"deploy"}),
        "change another schedule": (rule("PutTargets", "other"), nobody),
        "list state machines": (Request("states:ListStateMachines", "*"), {"retrain", "deploy"}),
        "publish alarms": (Request("sns:Publish", outputs["AlarmTopic"]), FLOWS),
        "submit jobs": (Request("batch:SubmitJob", outputs["L4SpotQueue"]), {"machines"}),
        "look at jobs": (Request("batch:DescribeJobs", "*"), {"machines", "deploy"}),
        "look at queues": (Request("batch:DescribeJobQueues", "*"), {"deploy"}),
        "change jobs": (
            Request(
                "batch:RegisterJobDefinition",
                f"arn:aws:batch:{REGION}:{ACCOUNT}:job-definition/metaflow_x",
            ),
            {"deploy"},
        ),
        "change queues": (Request("batch:UpdateJobQueue", outputs["L4Queue"]), nobody),
        "give a job its role": (passing("TrainRole", "ecs-tasks"), {"deploy"}),
        "give a machine of its own a role": (passing("TrainRole", "ec2"), nobody),
        "give a job the role of who deploys": (passing("DeployRole", "ecs-tasks"), nobody),
        "give a service the role of a consumer": (passing("ConsumerRole", "ecs-tasks"), nobody),
        "give both flows their role": (passing("StepFunctionsRole", "states"), {"deploy"}),
        "give the schedule its role": (passing("EventBridgeRole", "events"), {"deploy"}),
        "read the outputs of the stack": (
            Request(
                "cloudformation:DescribeStacks",
                f"arn:aws:cloudformation:{REGION}:{ACCOUNT}:stack/{STACK}/1",
            ),
            {"deploy"},
        ),
        "change the stack": (
            Request(
                "cloudformation:UpdateStack",
                f"arn:aws:cloudformation:{REGION}:{ACCOUNT}:stack/{STACK}/1",
            ),
            nobody,
        ),
        "read the logs of jobs": (
            Request(
                "logs:GetLogEvents",
                f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/batch/job:log-stream:x",
            ),
            {"deploy"},
        ),
        "start machines": (
            Request("ec2:RunInstances", f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/*"),
            nobody,
        ),
        "become another role": (Request("sts:AssumeRole", outputs["RegisterRole"]), nobody),
        "give itself rights": (Request("iam:PutRolePolicy", outputs["TrainRole"]), nobody),
    }


@pytest.fixture(scope="module")
def on_resources(deployed: Cloud) -> dict[str, Any]:
    return policies_on_resources(deployed, deployed.outputs(STACK)["Bucket"])


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_its_duty_and_nothing_else(
    role: str,
    deployed: Cloud,
    cases: dict[str, tuple[Request, set[str]]],
    on_resources: dict[str, Any],
):
    arn = deployed.outputs(STACK)[ROLES[role]]
    policies = policies_of(deployed, arn.rpartition("/")[2])
    allowed = decide(arn, policies, [request for request, _ in cases.values()], on_resources)
    actual = {name for name, is_allowed in zip(cases, allowed, strict=True) if is_allowed}
    assert actual == {name for name, (_, roles) in cases.items() if role in roles}


def test_each_request_that_anybody_makes_is_allowed_to_somebody(
    cases: dict[str, tuple[Request, set[str]]],
):
    known = set().union(*(roles for _, roles in cases.values()))
    assert known == set(ROLES)


@pytest.mark.parametrize(
    ("service", "roles"),
    [
        ("s3", {"retrain", "train", "judge", "register", "consumer", "deploy"}),
        ("sns", {"retrain", "train", "judge", "register"}),
        ("secretsmanager", set()),
    ],
)
def test_the_key_encrypts_only_through_a_service_that_the_duty_writes_to(
    service: str, roles: set[str], deployed: Cloud, on_resources: dict[str, Any]
):
    assert allowed_through("kms:GenerateDataKey", service, deployed, on_resources) == roles


def test_not_even_an_administrator_writes_the_files_of_a_version(
    deployed: Cloud, cases: dict[str, tuple[Request, set[str]]], on_resources: dict[str, Any]
):
    everything = {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
    }
    arn = f"arn:aws:iam::{ACCOUNT}:role/admin"
    names = ["write the files of a version", "delete the files of a version", "write results"]
    requests = [cases[name][0] for name in names]
    assert decide(arn, [everything], requests, on_resources) == [False, False, True]


@pytest.mark.parametrize(
    ("service", "roles"),
    [
        ("s3", {"retrain", "train", "judge", "register", "consumer", "deploy"}),
        # The policy that reads lets who deploys decrypt secrets, but read none.
        ("secretsmanager", {"retrain", "train", "judge", "register", "consumer", "deploy"}),
        ("sns", {"retrain", "train", "judge", "register"}),
        ("rds", set()),
    ],
)
def test_the_key_decrypts_only_through_a_service_that_the_duty_needs(
    service: str, roles: set[str], deployed: Cloud, on_resources: dict[str, Any]
):
    assert allowed_through("kms:Decrypt", service, deployed, on_resources) == roles


def allowed_through(
    action: str, service: str, deployed: Cloud, on_resources: dict[str, Any]
) -> set[str]:
    """Return the roles that may use the key of the stacks through a service."""
    key = deployed.client("kms").list_keys()["Keys"][0]["KeyArn"]
    through = Request(action, key, {"kms:ViaService": f"{service}.{REGION}.amazonaws.com"})
    outputs = deployed.outputs(STACK)
    actual = set()
    for role, output in ROLES.items():
        policies = policies_of(deployed, outputs[output].rpartition("/")[2])
        if decide(outputs[output], policies, [through], on_resources) == [True]:
            actual.add(role)
    return actual
