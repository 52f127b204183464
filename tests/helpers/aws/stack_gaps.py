"""Gaps of moto's CloudFormation, without which it does not resolve the stacks of infra/aws.

Three types of resources that it skips, outputs of nested stacks, names of parameter groups, and the
managed policies of a role.
"""

import json
from typing import Any

from moto.batch.models import ComputeEnvironment
from moto.cloudformation.models import Stack
from moto.core.common_models import CloudFormationModel
from moto.iam.models import Role, iam_backends
from moto.moto_api._internal import mock_random
from moto.rds.models import DBParameterGroup
from moto.s3.models import s3_backends
from moto.secretsmanager.models import secretsmanager_backends
from moto.sns.models import sns_backends


class _Made:
    """What moto asks of a type of resources."""

    KIND = ""

    def __init__(self, name: str):
        self.physical_resource_id = name

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @classmethod
    def cloudformation_type(cls) -> str:
        return cls.KIND

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return False

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Any,
        account_id: str,
        region_name: str,
        **kwargs: Any,
    ) -> Any:
        place = account_id, region_name
        return cls(cls.make(resource_name, cloudformation_json["Properties"], place))

    @classmethod
    def make(cls, name: str, properties: Any, place: tuple[str, str]) -> str:
        """Make the resource in an account and a region; return its name."""
        raise NotImplementedError

    @classmethod
    def delete_from_cloudformation_json(cls, *names: Any, **more: Any) -> None:
        """Keep the resource: moto replaces a nested stack to update it."""


class Secret(_Made, CloudFormationModel):
    KIND = "AWS::SecretsManager::Secret"

    @classmethod
    def make(cls, name: str, properties: Any, place: tuple[str, str]) -> str:
        made = secretsmanager_backends[place[0]][place[1]].create_secret(
            name=name,
            secret_string=_generated(properties.get("GenerateSecretString")),
            secret_binary=None,
            description=properties["Description"],
            tags=[],
            kms_key_id=properties["KmsKeyId"],
            client_request_token=None,
            replica_regions=[],
            force_overwrite=False,
        )
        return str(json.loads(made)["ARN"])


class BucketPolicy(_Made, CloudFormationModel):
    KIND = "AWS::S3::BucketPolicy"

    @classmethod
    def make(cls, name: str, properties: Any, place: tuple[str, str]) -> str:
        policy = json.dumps(properties["PolicyDocument"]).encode()
        s3_backends[place[0]]["aws"].put_bucket_policy(properties["Bucket"], policy)
        return name


class Subscription(_Made, CloudFormationModel):
    KIND = "AWS::SNS::Subscription"

    @classmethod
    def make(cls, name: str, properties: Any, place: tuple[str, str]) -> str:
        made = sns_backends[place[0]][place[1]].subscribe(
            properties["TopicArn"], properties["Endpoint"], properties["Protocol"]
        )
        return str(made.arn)


def _generated(rule: dict[str, Any] | None) -> str | None:
    """Return what Secrets Manager would generate; None for a secret without content."""
    if rule is None:
        return None
    password = mock_random.get_random_hex(rule["PasswordLength"])
    if "GenerateStringKey" not in rule:
        return password
    return json.dumps(
        {**json.loads(rule["SecretStringTemplate"]), rule["GenerateStringKey"]: password}
    )


def _output(stack: Stack, name: str) -> str:
    """Return an output of a nested stack; `name` is Outputs.NAME."""
    return str(stack.output_map[name.removeprefix("Outputs.")].value)


_create_role = Role.create_from_cloudformation_json


def _create_role_with_policies(
    name: str, resource: Any, account: str, region: str, **more: Any
) -> Any:
    role = _create_role(name, resource, account, region, **more)
    for policy in resource["Properties"].get("ManagedPolicyArns", []):
        # moto does not have the policies that AWS manages.
        if "::aws:" not in policy:
            iam_backends[account]["aws"].attach_role_policy(policy, role.name)
    return role


_delete_role = Role.delete_from_cloudformation_json


_create_environment_with_role = ComputeEnvironment.create_from_cloudformation_json


def _delete_role_with_policies(name: str, resource: Any, account: str, region: str) -> None:
    backend = iam_backends[account]["aws"]
    for policy in backend.list_attached_role_policies(name)[0]:
        backend.detach_role_policy(policy.arn, name)
    _delete_role(name, resource, account, region)


def _create_environment(name: str, resource: Any, account: str, region: str, **more: Any) -> Any:
    """Create a compute environment, by default with Batch's own role, which moto does not make."""
    own = "AWSServiceRoleForBatch"
    iam = iam_backends[account]["aws"]
    made = next((role for role in iam.get_roles() if role.name == own), None)
    role = made or iam.create_role(own, "{}", "/aws-service-role/", None, "", [], None)
    properties = {"ServiceRole": role.arn, **resource["Properties"]}
    return _create_environment_with_role(
        name, {**resource, "Properties": properties}, account, region, **more
    )


def bridge_gaps() -> None:
    """Give moto's CloudFormation what it lacks, for the rest of this process."""
    ComputeEnvironment.create_from_cloudformation_json = _create_environment
    Stack.get_cfn_attribute = _output
    Role.create_from_cloudformation_json = _create_role_with_policies
    Role.delete_from_cloudformation_json = _delete_role_with_policies
    DBParameterGroup.physical_resource_id = property(lambda group: group.name)
