"""The commands and tables of the texts on AWS: names exist, numbers add up."""

import json
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import jmespath
import pytest
from botocore import xform_name

from tests.helpers.aws.stacks import FOLDER, parameters, resources, template
from tests.helpers.paths import ROOT

README = FOLDER / "README.md"
TEXTS = [
    README,
    ROOT / "infra" / "kubernetes" / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("runbook", "deploying", "retraining")),
]

OF_THE_CLI = {
    *(("cloudformation", name) for name in ("package", "deploy", "wait")),
    ("ecr", "get-login-password"),
    ("s3", "mb"),
    ("s3", "rb"),
    ("s3", "cp"),
}
"""Commands that are not operations of a service."""

COMMON = {"query", "output", "region"}
"""Flags of every command."""

SPECIAL = {
    ("ec2", "run-instances"): {"security-group-ids", "subnet-id"},
    ("rds", "modify-db-instance"): {"no-deletion-protection"},
}
"""Flags that the CLI makes of others."""

HOURS = 730


def commands(text: str) -> Iterator[tuple[str, str, set[str]]]:
    """Yield service, operation and flags of each command of AWS CLI in a text."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    joined = re.sub(r"\\\n\s*", " ", "\n".join([*blocks, *inline]))
    for found in re.finditer(r"\baws ((?!aws )[^\n])*", joined):
        words = re.match(r"aws ([a-z][a-z0-9-]+) ([a-z][a-z-]+)", found[0])
        if words is None or words[2].startswith("-"):
            continue
        # Up to the end of the command; what is quoted holds flags of nobody.
        own = re.split(r" && |; do| \| ", re.sub(r"'[^']*'|\$\(output[^)]*\)", "", found[0]))[0]
        yield words[1].replace("s3api", "s3"), words[2], set(re.findall(r" --([a-z0-9-]+)", own))


@cache
def operations(service: str) -> dict[str, Any]:
    """Return the operations of a service, by the names that the CLI gives them."""
    model = boto3.client(service, region_name="us-east-1").meta.service_model
    return {xform_name(one, "-"): model.operation_model(one) for one in model.operation_names}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_command_of_aws_exists_with_its_flags(path: Path):
    for service, operation, flags in commands(path.read_text()):
        if (service, operation) in OF_THE_CLI:
            continue
        known = operations(service)
        assert operation in known, f"aws {service} {operation}"
        shape = known[operation].input_shape
        members = {xform_name(name, "-") for name in (shape.members if shape else ())}
        wrong = flags - members - COMMON - SPECIAL.get((service, operation), set())
        assert not wrong, f"aws {service} {operation}: {wrong}"


def test_the_readme_has_many_commands():
    assert len(list(commands(README.read_text()))) > 40


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_query_is_one_of_jmespath(path: Path):
    for single, double in re.findall(r"--query (?:'([^']*)'|\"([^\"]*)\")", path.read_text()):
        jmespath.compile(single or double)


def test_the_queries_find_what_they_look_for():
    read = README.read_text()
    (databases,) = re.findall(r'--query "(DBInstances[^"]*)"', read)
    found = [
        {"DBInstanceIdentifier": name, "TagList": [{"Key": "Backup", "Value": value}]}
        for name, value in (("a", "rlhf"), ("b", "other"))
    ]
    assert jmespath.search(databases, {"DBInstances": found}) == ["a"]
    (groups,) = re.findall(r"--query '(logGroups[^']*)'", read)
    logs = {"logGroups": [{"logGroupName": "a"}, {"logGroupName": "b", "retentionInDays": 1}]}
    assert jmespath.search(groups, logs) == ["a"]
    (environments,) = re.findall(r'--query "(computeEnvironments[^"]*)"', read)
    tagged = [{"computeEnvironmentName": "a", "tags": {"Project": "rlhf"}}, {"tags": {}}]
    assert jmespath.search(environments, {"computeEnvironments": tagged}) == ["a"]
    (outputs,) = re.findall(r'--query "(Stacks[^"]*)"', read)
    stack = {"Outputs": [{"OutputKey": "Bucket", "OutputValue": "x"}]}
    assert jmespath.search(outputs.replace("$1", "Bucket"), {"Stacks": [stack]}) == ["x"]


def test_every_output_that_a_command_reads_exists():
    read = set(re.findall(r"\$\(output (\w+)", README.read_text()))
    assert len(read) > 15
    assert read <= set(template("root")["Outputs"])


def test_the_table_of_what_grows_names_folders_of_the_flow_only():
    """`inputs/` at the top of the bucket has the originals of the users."""
    table = README.read_text().partition("## What grows")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    folders = re.findall(r"`([\w/]+/)`", "\n".join(first))
    assert len(folders) > 5
    assert [name for name in folders if not name.startswith(("metaflow/", "mlflow/"))] == []


def test_files_of_commands_exist_from_the_root():
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", README.read_text(), re.M | re.S))
    named = set(re.findall(r"(?:file://)?\b((?:infra|flows|docs)/[\w./-]+)", blocks))
    assert {"infra/aws/root.yaml", "infra/aws/parameters.json", "infra/mlflow"} <= named
    for name in named:
        assert (ROOT / name).exists(), name
    assert "cd infra" not in blocks


def test_files_with_keys_get_neither_into_git_nor_into_an_image():
    texts = "".join(path.read_text() for path in TEXTS)
    read = r"(?:file://|--from-env-file |&& \. \./)([\w.-]+)(?![\w./-])"
    named = set(re.findall(read, texts))
    assert named == {"judge.json", "judge.env", "mlflow.json", "rights.env"}
    assert named == set(re.findall(r"\(umask 077 && cat > ([\w.-]+)\)", texts))
    assert named == set(re.findall(r"^rm ([\w.-]+)$", texts, re.M))
    for file in (".gitignore", ".dockerignore"):
        patterns = [line.removeprefix("**/") for line in (ROOT / file).read_text().splitlines()]
        for name in named | {".env", ".env.local"}:
            assert any(fnmatch(name, pattern) for pattern in patterns), f"{name}: {file}"


def test_the_blocks_are_valid_for_a_shell():
    for block in re.findall(r"^```\n(.*?)^```", README.read_text(), re.M | re.S):
        ran = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert ran.returncode == 0, f"{block}\n{ran.stderr}"


def test_an_upgrade_overrides_a_container_of_its_task():
    joined = re.sub(r"\\\n\s*", " ", README.read_text())
    found = re.findall(r"--task-definition \$\(output (\w+)\).*?--overrides '([^']*)'", joined)
    assert [name for name, _ in found] == ["MlflowTask", "MetadataTask"]
    for (_, overrides), stack in zip(found, ("tracking", "metadata"), strict=True):
        (override,) = json.loads(overrides)["containerOverrides"]
        task = template(stack)["Resources"]["Task"]["Properties"]
        (container,) = task["ContainerDefinitions"]
        assert override["name"] == container["Name"]
        variables = {one["Name"] for one in container["Environment"] + container["Secrets"]}
        used = set(re.findall(r"\$\{(\w+)\}", " ".join(override["command"])))
        assert used <= variables
        if stack == "tracking":
            # The entry point of the task is a shell, which reads one word.
            assert container["EntryPoint"] == ["/bin/sh", "-c"]
            (script,) = override["command"]
            ran = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True)
            assert ran.returncode == 0, ran.stderr


def test_the_quotas_are_those_of_the_machines():
    rows = table("machines", "GPU", "vCPUs", "on demand", "Spot")
    codes = {row[0].partition(".")[0]: row[3:] for row in rows}
    machines = [parameters()[name] for name in parameters() if name.endswith("Machines")]
    families = {one.partition(".")[0] for each in machines for one in each.split(",")}
    assert set(codes) == families | {parameters()["CpuInstanceTypes"]}
    assert {codes[family][0] for family in ("g5", "g6", "g6e")} == {"L-DB2E81BA"}
    assert {codes[family][0] for family in ("p4d", "p5")} == {"L-417A185B"}
    for _, spot in codes.values():
        assert spot in README.read_text()


def test_what_outlives_the_stack_and_what_protects_it_are_named():
    kept = {
        resource["Type"]
        for path in FOLDER.glob("*.yaml")
        for resource in template(path.stem)["Resources"].values()
        if resource.get("DeletionPolicy", "Delete") != "Delete"
    }
    assert kept == {
        "AWS::Backup::BackupVault",
        "AWS::ECR::Repository",
        "AWS::KMS::Key",
        "AWS::RDS::DBInstance",
        "AWS::S3::Bucket",
    }
    rows = " ".join(row[0] for row in table("what", "how it goes"))
    for word in ("vault", "repositories", "key", "snapshots of both databases", "bucket"):
        assert word in rows
    protected = [one["DeletionProtection"] for _, one in resources("AWS::RDS::DBInstance")]
    assert protected == [True]
    text = README.read_text()
    assert "--no-deletion-protection" in text
    ((_, balancer),) = resources("AWS::ElasticLoadBalancingV2::LoadBalancer")
    assert {"Key": "deletion_protection.enabled", "Value": "true"} in balancer[
        "LoadBalancerAttributes"
    ]
    assert "Key=deletion_protection.enabled,Value=false" in text


def test_the_standing_cost_is_that_of_what_the_templates_make():
    rows = table("what", "resource", "number", "unit price", "a month")
    *rows, total = rows
    counted = dict(numbers())
    sums = 0.0
    for what, kind, number, price, month in rows:
        assert any(True for _ in resources(kind)), kind
        assert float(number) == counted.pop(what), what
        amount, per = re.fullmatch(r"([\d.]+) an? (hour|month)", price).groups()
        expected = float(number) * float(amount) * (HOURS if per == "hour" else 1)
        assert float(month) == pytest.approx(expected, abs=0.006), what
        sums += float(month)
    assert not counted
    assert float(total[4].strip("*")) == pytest.approx(sums, abs=0.001)


def numbers() -> Iterator[tuple[str, float]]:
    """Yield how many units the templates make, by the words of the table."""
    root = template("root")["Resources"]
    nested = [one["Properties"]["TemplateURL"] for one in root.values()]
    databases = nested.count("database.yaml")
    endpoints = [one for _, one in resources("AWS::EC2::VPCEndpoint")]
    paid = sum(one["VpcEndpointType"] == "Interface" for one in endpoints)
    # The other task definition runs once.
    servers = [
        template(name)["Resources"]["Task"]["Properties"] for name in ("metadata", "tracking")
    ]
    ((_, database),) = resources("AWS::RDS::DBInstance")
    assert database["MultiAZ"] is True
    assert parameters()["DatabaseClass"] == "db.t4g.small"
    secrets = [name for name, _ in resources("AWS::SecretsManager::Secret")]
    of_databases = sum(name.startswith("database.") for name in secrets)
    yield "NAT gateway", len(list(resources("AWS::EC2::NatGateway")))
    yield "its public address", len(list(resources("AWS::EC2::EIP")))
    yield "endpoints of AWS services, in two zones", 2 * paid
    yield "load balancer", len(list(resources("AWS::ElasticLoadBalancingV2::LoadBalancer")))
    yield "vCPUs of the two servers", sum(int(task["Cpu"]) for task in servers) / 1024
    yield "GB of the two servers", sum(int(task["Memory"]) for task in servers) / 1024
    yield "databases, db.t4g.small in two zones", databases
    yield "GB of their disks, in two zones", databases * int(database["AllocatedStorage"])
    yield "secrets", len(secrets) + (databases - 1) * of_databases
    yield "key", len(list(resources("AWS::KMS::Key")))
    yield "private zone", len(list(resources("AWS::Route53::HostedZone")))


def table(*head: str) -> list[list[str]]:
    """Return the rows of the table with this head."""
    _, _, rest = README.read_text().partition(f"| {' | '.join(head)} |\n")
    rows, _, _ = rest.partition("\n\n")
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()[1:]]
