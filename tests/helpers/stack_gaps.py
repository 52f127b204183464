"""Gaps of moto's CloudFormation: outputs of nested stacks, secrets, names of parameter groups."""

import json
from typing import Any

from moto.cloudformation.models import Stack
from moto.core.common_models import CloudFormationModel
from moto.moto_api._internal import mock_random
from moto.rds.models import DBParameterGroup
from moto.secretsmanager.models import secretsmanager_backends


class SecretOfStack(CloudFormationModel):
    """`AWS::SecretsManager::Secret`, which moto skips; it exists in moto's Secrets Manager."""

    def __init__(self, arn: str):
        self.physical_resource_id = arn

    @staticmethod
    def cloudformation_name_type() -> str:
        return "Name"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::SecretsManager::Secret"

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return attr == "Id"

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Any,
        account_id: str,
        region_name: str,
        **kwargs: Any,
    ) -> "SecretOfStack":
        properties = cloudformation_json["Properties"]
        made = secretsmanager_backends[account_id][region_name].create_secret(
            name=resource_name,
            secret_string=_generated(properties.get("GenerateSecretString")),
            secret_binary=None,
            description=properties["Description"],
            tags=[],
            kms_key_id=properties["KmsKeyId"],
            client_request_token=None,
            replica_regions=[],
            force_overwrite=False,
        )
        return cls(json.loads(made)["ARN"])


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


def output_of_nested_stack(stack: Stack, name: str) -> str:
    """Return an output of a nested stack, which moto cannot do."""
    return str(stack.output_map[name.removeprefix("Outputs.")].value)


def bridge_gaps() -> None:
    """Give moto's CloudFormation what it lacks, for the rest of this process."""
    Stack.get_cfn_attribute = output_of_nested_stack
    DBParameterGroup.physical_resource_id = property(lambda group: group.name)
