"""Policies of the roles of a cloud, and decisions on requests by IAM Simulate.

IAM Simulate (npm) evaluates actions, resources, conditions, explicit denials and the policy of the
bucket, with the actions, resources and condition keys that AWS documents. moto's own enforcement
evaluates resources for S3 alone, no conditions, and no policy of a bucket. Neither knows what a
service does on behalf of a role. The library has the licence AGPL-3.0; only this test runs it, in
a process of its own.
"""

import ast
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.aws.stacks import ACCOUNT, Cloud
from tests.helpers.paths import ROOT

FOLDER = ROOT / ".venv-aws"
"""Environment of the tools, which `make deployed` makes."""

MISSING = None
if shutil.which("node") is None or not (FOLDER / "node_modules" / "@cloud-copilot").is_dir():
    MISSING = "IAM Simulate is not installed: `make deployed` installs it, with npm."


@dataclass(frozen=True)
class Request:
    """A request of a role."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)
    """Condition keys beside those of a request by TLS 1.3."""


def policies_of(cloud: Cloud, role: str) -> list[Any]:
    """Return all policies of a role, except those that AWS manages."""
    iam = cloud.client("iam")
    attached = iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]
    arns = [one["PolicyArn"] for one in attached if "::aws:" not in one["PolicyArn"]]
    return [
        _document(iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"])
        for name in iam.list_role_policies(RoleName=role)["PolicyNames"]
    ] + [
        _document(
            iam.get_policy_version(PolicyArn=arn, VersionId="v1")["PolicyVersion"]["Document"]
        )
        for arn in arns
    ]


def _document(found: Any) -> Any:
    """Return a policy as a dictionary; moto returns one of CloudFormation as Python writes it."""
    return ast.literal_eval(found) if isinstance(found, str) else found


def policies_on_resources(cloud: Cloud, bucket: str) -> dict[str, Any]:
    """Return the policies of the bucket and of the key, by the service that applies them."""
    kms = cloud.client("kms")
    (key,) = kms.list_keys()["Keys"]
    return {
        "s3": json.loads(cloud.client("s3").get_bucket_policy(Bucket=bucket)["Policy"]),
        # moto returns a key policy of CloudFormation as it was given.
        "kms": kms.get_key_policy(KeyId=key["KeyId"], PolicyName="default")["Policy"],
    }


def decide(
    principal: str,
    policies: Sequence[Any],
    requests: Sequence[Request],
    on_resources: Mapping[str, Any],
) -> list[bool]:
    """Return which requests of a principal are allowed.

    Args:
        principal: ARN of the role.
        policies: policies of the role.
        requests: requests to decide on.
        on_resources: policies of the bucket and of the key, by the service that applies them.
    """
    secure = {"aws:SecureTransport": "true", "aws:PrincipalArn": principal}
    words = [
        {
            "principal": principal,
            "policies": policies,
            "account": ACCOUNT,
            "action": one.action,
            "resource": one.resource,
            "resourcePolicy": on_resources.get(one.action.partition(":")[0]),
            "context": {
                **secure,
                **({"s3:TlsVersion": "1.3"} if one.action.startswith("s3:") else {}),
                **one.context,
            },
        }
        for one in requests
    ]
    ran = subprocess.run(
        ["node", ROOT / "tests" / "infra" / "simulate.cjs", FOLDER],
        input=json.dumps(words),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return [decision == "Allowed" for decision in json.loads(ran.stdout)]
