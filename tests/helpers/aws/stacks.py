"""The stacks of infra/aws: their templates, and a cloud of moto to which they are deployed."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import boto3
import requests
from cfnlint.decode import cfn_yaml
from moto.server import ThreadedMotoServer

from tests.helpers.aws.stack_gaps import bridge_gaps
from tests.helpers.paths import ROOT

FOLDER = ROOT / "infra" / "aws"
TEMPLATES = sorted(FOLDER.glob("*.yaml"))
ACCOUNT, REGION = "123456789012", "us-east-1"
UPLOADS = "templates"
"""Bucket of the uploaded templates."""


@cache
def template(name: str) -> Any:
    """Return a template with all functions in their long form, such as {"Ref": NAME}."""
    return json.loads(json.dumps(cfn_yaml.load(str(FOLDER / f"{name}.yaml"))))


def resources(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and properties of all resources of a type in all templates."""
    for path in TEMPLATES:
        for name, resource in template(path.stem)["Resources"].items():
            if resource["Type"] == kind:
                yield f"{path.stem}.{name}", resource.get("Properties", {})


YOURS = {
    "Domain": "rlhf.example.com",
    "Certificate": f"arn:aws:acm:{REGION}:{ACCOUNT}:certificate/01234567-89ab-cdef",
    "Operator": f"arn:aws:iam::{ACCOUNT}:role/people",
    "Deployer": f"arn:aws:iam::{ACCOUNT}:role/people",
    "AlarmEmail": "people@example.com",
}
"""Values that parameters.json leaves to its reader."""


def given_parameters() -> dict[str, str]:
    """Return the values in parameters.json."""
    pairs = json.loads((FOLDER / "parameters.json").read_text())
    return dict(pair.split("=", 1) for pair in pairs)


def parameters() -> dict[str, str]:
    """Return the values in parameters.json, and examples of those that it leaves open."""
    return given_parameters() | YOURS


@dataclass(frozen=True)
class Cloud:
    """A cloud of moto on 127.0.0.1."""

    url: str

    @property
    def variables(self) -> dict[str, str]:
        """Environment of clients."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
        }

    def client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def certificate(self, domain: str) -> str:
        """Return the ARN of a new certificate, without which there is no HTTPS listener."""
        made = self.client("acm").request_certificate(DomainName=f"*.{domain}")
        return str(made["CertificateArn"])

    def upload(self) -> str:
        """Upload the nested templates; return the root template with their addresses."""
        s3 = self.client("s3")
        s3.create_bucket(Bucket=UPLOADS)
        for path in TEMPLATES:
            # In the long form: moto reads `!GetAtt Key.Outputs.Key` as three names.
            s3.put_object(Bucket=UPLOADS, Key=path.name, Body=json.dumps(template(path.stem)))
        root = copy.deepcopy(template("root"))
        for stack in root["Resources"].values():
            address = f"https://{UPLOADS}.s3.amazonaws.com/{stack['Properties']['TemplateURL']}"
            stack["Properties"]["TemplateURL"] = address
        return json.dumps(root)

    def create(self, name: str, values: Mapping[str, str]) -> None:
        self.client("cloudformation").create_stack(
            StackName=name,
            TemplateBody=self.upload(),
            Parameters=_as_list(values),
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )

    def update(self, name: str, values: Mapping[str, str]) -> None:
        self.client("cloudformation").update_stack(
            StackName=name,
            UsePreviousTemplate=True,
            Parameters=_as_list(values),
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )

    def outputs(self, name: str) -> dict[str, str]:
        """Return the outputs of a stack."""
        (stack,) = self.client("cloudformation").describe_stacks(StackName=name)["Stacks"]
        return {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}


@contextmanager
def cloud() -> Iterator[Cloud]:
    """Run an empty cloud of moto while the context lasts."""
    bridge_gaps()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    # By this name, moto finds uploaded templates at the addresses that AWS's command makes.
    made = Cloud(f"http://localhost:{port}")
    requests.post(f"{made.url}/moto-api/reset", timeout=60)
    try:
        yield made
    finally:
        requests.post(f"{made.url}/moto-api/reset", timeout=60)
        server.stop()


def _as_list(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"ParameterKey": key, "ParameterValue": value} for key, value in values.items()]
