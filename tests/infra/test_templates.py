"""What the templates of infra/aws promise, read from the templates themselves."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.storage.workspace import Workspace
from tests.helpers.aws.stacks import (
    FOLDER,
    TEMPLATES,
    YOURS,
    given_parameters,
    parameters,
    resources,
    template,
)
from tests.helpers.paths import ROOT

REASONS = {
    "key.Key PoliciesOfThisAccount": "a key policy applies to its own key alone",
    "key.Key LogGroups": "a key policy applies to its own key alone",
    "key.Key Alarms": "a key policy applies to its own key alone",
    "roles.RetrainRole states:ListStateMachines": "AWS knows no resource for this action",
    "roles.StepFunctionsRole batch:DescribeJobs": "AWS knows no resource for this action",
    "roles.DeployRole states:ListStateMachines": "AWS knows no resource for this action",
    "roles.DeployRole batch:Describe*, ListJobs": "AWS knows no resource for these actions",
}
"""Why a statement may name all resources, by the resource and its Sid or action."""

ENCRYPTED = {
    "AWS::ECR::Repository": ("EncryptionConfiguration", "KmsKey"),
    "AWS::Logs::LogGroup": ("KmsKeyId",),
    "AWS::RDS::DBInstance": ("KmsKeyId",),
    "AWS::SecretsManager::Secret": ("KmsKeyId",),
    "AWS::SNS::Topic": ("KmsMasterKeyId",),
    "AWS::SQS::Queue": ("KmsMasterKeyId",),
}
"""Where the resources of a type name their key."""


def one(kind: str) -> dict[str, Any]:
    """Return the properties of the only resource of a type."""
    ((_, properties),) = resources(kind)
    return properties


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all dictionaries within a value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from dictionaries(part)


def statements(value: Any) -> Iterator[dict[str, Any]]:
    return (part for part in dictionaries(value) if "Effect" in part)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_needs_no_aliases_which_cloudformation_does_not_know(path):
    assert not re.search(r"(^|[\s:-])(&|\*)[a-z]\w*$|<<:", path.read_text(), re.MULTILINE)


def test_the_parameters_file_gives_each_parameter_a_value():
    assert set(parameters()) == set(template("root")["Parameters"])


def test_every_nested_stack_is_a_template_and_gets_all_its_parameters():
    nested = [
        (properties["TemplateURL"], set(properties.get("Parameters", {})))
        for _, properties in resources("AWS::CloudFormation::Stack")
    ]
    assert {name for name, _ in nested} == {path.name for path in TEMPLATES} - {"root.yaml"}
    for name, given in nested:
        assert given == set(template(name.removesuffix(".yaml")).get("Parameters", {}))


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_the_stacks_key_encrypts(kind: str):
    found = list(resources(kind))
    assert found
    for name, properties in found:
        value = properties
        for part in ENCRYPTED[kind]:
            value = value[part]
        assert value == {"Ref": "Key"}, name


def test_the_key_rotates_and_outlives_the_stack():
    assert one("AWS::KMS::Key")["EnableKeyRotation"] is True
    assert template("key")["Resources"]["Key"]["DeletionPolicy"] == "Retain"


def test_the_bucket_is_encrypted_versioned_and_not_public():
    bucket = one("AWS::S3::Bucket")
    (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"] == {
        "SSEAlgorithm": "aws:kms",
        "KMSMasterKeyID": {"Ref": "Key"},
    }
    assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    assert len(bucket["PublicAccessBlockConfiguration"]) == 4
    assert template("storage")["Resources"]["Bucket"]["DeletionPolicy"] == "Retain"


def test_the_bucket_refuses_requests_without_tls():
    policy = one("AWS::S3::BucketPolicy")["PolicyDocument"]["Statement"]
    (tls,) = [each for each in policy if each["Sid"] == "TlsOnly"]
    assert (tls["Effect"], tls["Principal"], tls["Action"]) == ("Deny", "*", "s3:*")
    assert tls["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert len(tls["Resource"]) == 2


def test_the_bucket_forgets_old_versions_unfinished_uploads_and_runs():
    rules = one("AWS::S3::Bucket")["LifecycleConfiguration"]["Rules"]
    assert [rule["Status"] for rule in rules] == ["Enabled"] * 5
    old, unfinished, runs, old_of_runs, unread = rules
    assert old["NoncurrentVersionExpiration"]["NoncurrentDays"] == 90
    assert unfinished["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] == 7
    # Where the copies of checkpoints are, which a run removes; of two rules, S3 uses the shorter.
    own = Workspace("outputs", "s3://bucket/metaflow/rlhf")
    assert own.address(own.folder_of_run("7") / "ppo").key.startswith(runs["Prefix"])
    assert runs["Prefix"] == old_of_runs["Prefix"] == "metaflow/rlhf/runs/"
    assert old_of_runs["NoncurrentVersionExpiration"]["NoncurrentDays"] == 1
    # Whatever is not below runs/ stays: inputs, caches, and the artifacts of MLflow.
    assert [rule["Id"] for rule in rules if "ExpirationInDays" in rule] == [runs["Id"]]
    # It moves objects of the whole bucket, and they stay readable at once.
    assert unread["Transitions"] == [
        {"StorageClass": "INTELLIGENT_TIERING", "TransitionInDays": 30}
    ]
    assert "Prefix" not in unread


def test_images_are_scanned_and_their_tags_never_move():
    found = list(resources("AWS::ECR::Repository"))
    assert len(found) == 2
    for _, repository in found:
        assert repository["ImageTagMutability"] == "IMMUTABLE"
        assert repository["ImageScanningConfiguration"] == {"ScanOnPush": True}
        # A deployed image has a tag: only images without one expire.
        policy = json.loads(repository["LifecyclePolicy"]["LifecyclePolicyText"])
        (rule,) = policy["rules"]
        assert rule["selection"]["tagStatus"] == "untagged"
        assert rule["action"] == {"type": "expire"}


def test_nothing_lets_in_anybody_from_outside():
    rules = [
        (name, rule)
        for name, group in resources("AWS::EC2::SecurityGroup")
        for rule in group.get("SecurityGroupIngress", [])
    ]
    assert rules
    for name, rule in rules:
        own = {"Fn::Sub": "${NetworkPrefix}.0.0/16"}
        assert "SourceSecurityGroupId" in rule or rule["CidrIp"] == own, name
    # Rules elsewhere would escape this test.
    assert not list(resources("AWS::EC2::SecurityGroupIngress"))


def test_no_machine_gets_a_public_address():
    subnets = list(resources("AWS::EC2::Subnet"))
    assert len(subnets) == 3
    assert all(subnet["MapPublicIpOnLaunch"] is False for _, subnet in subnets)
    services = list(resources("AWS::ECS::Service"))
    assert len(services) == 2
    for _, service in services:
        network = service["NetworkConfiguration"]["AwsvpcConfiguration"]
        assert network["AssignPublicIp"] == "DISABLED"
    assert one("AWS::ElasticLoadBalancingV2::LoadBalancer")["Scheme"] == "internal"


def test_only_the_nat_gateway_is_beside_the_way_to_the_internet():
    network = template("network")["Resources"]
    ways = [
        (name, one["Properties"]["RouteTableId"]["Ref"])
        for name, one in network.items()
        if one["Type"] == "AWS::EC2::Route" and "GatewayId" in one["Properties"]
    ]
    assert ways == [("NatRouteToInternet", "NatRoutes")]
    members = [
        one["Properties"]["SubnetId"]["Ref"]
        for one in network.values()
        if one["Type"] == "AWS::EC2::SubnetRouteTableAssociation"
        and one["Properties"]["RouteTableId"] == {"Ref": "NatRoutes"}
    ]
    assert members == ["NatSubnet"]
    assert network["Nat"]["Properties"]["SubnetId"] == {"Ref": "NatSubnet"}
    assert "NatSubnet" not in json.dumps(template("network")["Outputs"])


def test_the_services_of_aws_have_endpoints():
    names = [one["ServiceName"]["Fn::Sub"] for _, one in resources("AWS::EC2::VPCEndpoint")]
    services = {name.partition("${AWS::Region}.")[2] for name in names}
    assert services == set("s3 ecr.api ecr.dkr logs secretsmanager states batch sns".split())


def test_a_container_reaches_the_notice_of_a_spot_machine():
    options = one("AWS::EC2::LaunchTemplate")["LaunchTemplateData"]["MetadataOptions"]
    assert options["HttpPutResponseHopLimit"] == 2
    assert (options["HttpEndpoint"], options["HttpTokens"]) == ("enabled", "required")


def test_disks_of_machines_are_encrypted():
    (disk,) = one("AWS::EC2::LaunchTemplate")["LaunchTemplateData"]["BlockDeviceMappings"]
    assert disk["Ebs"]["Encrypted"] is True
    environments = list(resources("AWS::Batch::ComputeEnvironment"))
    assert len(environments) == 3
    for _, environment in environments:
        machines = environment["ComputeResources"]
        assert machines["LaunchTemplate"]["LaunchTemplateId"] == {"Ref": "Machine"}
        assert machines["MinvCpus"] == 0


def test_machines_take_new_images_and_a_job_that_runs_may_end():
    for name, environment in resources("AWS::Batch::ComputeEnvironment"):
        # In place, which Batch does with its own role only.
        assert environment["ReplaceComputeEnvironment"] is False, name
        assert "ServiceRole" not in environment
        assert environment["ComputeResources"]["UpdateToLatestImageVersion"] is True
        policy = environment["UpdatePolicy"]
        assert policy["TerminateJobsOnUpdate"] is False
        assert policy["JobExecutionTimeoutMinutes"] == 2880


def test_a_queue_has_one_type_of_gpu_and_machines_with_few_of_them():
    families = {"L4": "g6", "A10g": "g5", "L40s": "g6e", "A100": "p4d", "H100": "p5"}
    root, queues = template("root")["Resources"], set()
    for name, stack in root.items():
        if stack["Properties"]["TemplateURL"] == "gpu.yaml":
            machines = parameters()[f"{name}Machines"].split(",")
            assert {one.partition(".")[0] for one in machines} == {families[name]}
            # A family would have machines of eight GPUs, which Batch takes for a step with one.
            assert all("." in one for one in machines)
            queues |= {f"{name}Queue", f"{name}SpotQueue"}
            assert stack["Properties"]["Parameters"]["InstanceTypes"] == {
                "Fn::Join": [",", {"Ref": f"{name}Machines"}]
            }
    assert {f"{name}{kind}Queue" for name in families for kind in ("", "Spot")} == queues
    assert queues < set(template("root")["Outputs"])
    for name, environment in resources("AWS::Batch::ComputeEnvironment"):
        if name.startswith("gpu."):
            assert environment["ComputeResources"]["InstanceTypes"] == {"Ref": "InstanceTypes"}


def test_a_job_that_never_starts_is_cancelled_and_a_blocked_queue_is_told():
    queues = list(resources("AWS::Batch::JobQueue"))
    assert len(queues) == 3
    for name, queue in queues:
        actions = queue["JobStateTimeLimitActions"]
        assert {(one["State"], one["Action"]) for one in actions} == {("RUNNABLE", "CANCEL")}
        limits = {one["Reason"]: one["MaxTimeSeconds"] for one in actions}
        assert limits == {
            "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": 600,
            "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": 600,
            "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": 43_200,
        }, name
    rule = template("alarms")["Resources"]["QueueBlocked"]["Properties"]
    assert rule["EventPattern"] == {
        "source": ["aws.batch"],
        "detail-type": ["Batch Job Queue Blocked"],
    }
    assert [target["Arn"] for target in rule["Targets"]] == [{"Ref": "Topic"}]
    allowed = json.dumps(one("AWS::SNS::TopicPolicy"))
    assert '["RunFailed", "Arn"]' in allowed
    assert '["QueueBlocked", "Arn"]' in allowed


@pytest.mark.parametrize("name", YOURS)
def test_what_only_its_reader_knows_is_required_with_words(name: str):
    """CloudFormation refuses an empty value before it makes anything, with these words."""
    parameter = template("root")["Parameters"][name]
    assert given_parameters()[name] == ""
    assert not re.fullmatch(parameter["AllowedPattern"], "")
    assert re.fullmatch(parameter["AllowedPattern"], YOURS[name])
    assert parameter["ConstraintDescription"].startswith("must be ")
    assert len(parameter["Description"].split()) > 5


WRONG = {
    "Domain": ["localhost", "https://rlhf.example.com", "RLHF.example.com", "-"],
    "Certificate": ["arn:aws:iam::123456789012:server-certificate/x", "*.rlhf.example.com"],
    "Operator": ["people", "arn:aws:iam::1234:role/people", "arn:aws:iam::123456789012:root"],
    "Deployer": ["*", "arn:aws:sts::123456789012:assumed-role/people/me"],
    "AlarmEmail": ["people", "people@example", "a b@example.com"],
    "CopyVault": ["elsewhere", "arn:aws:s3:::bucket"],
}


@pytest.mark.parametrize(("name", "value"), [(name, one) for name in WRONG for one in WRONG[name]])
def test_a_wrong_value_is_refused_before_anything_is_made(name: str, value: str):
    assert not re.fullmatch(template("root")["Parameters"][name]["AllowedPattern"], value)


def test_what_costs_money_has_the_name_of_the_project():
    """Tags of the stack reach all other resources, but no machines of Batch and no tasks."""
    for name, environment in resources("AWS::Batch::ComputeEnvironment"):
        assert environment["ComputeResources"]["Tags"] == {"Project": {"Ref": "Project"}}, name
    for name, service in resources("AWS::ECS::Service"):
        assert service["PropagateTags"] == "SERVICE", name
    assert "--tags Project=" in (FOLDER / "README.md").read_text()


def test_logs_are_deleted_after_a_year():
    groups = list(resources("AWS::Logs::LogGroup"))
    assert len(groups) == 3
    assert all(group["RetentionInDays"] == 365 for _, group in groups)


def test_a_backup_of_databases_and_bucket_is_copied_elsewhere():
    plan = one("AWS::Backup::BackupPlan")["BackupPlan"]
    (rule,) = plan["BackupPlanRule"]
    assert rule["ScheduleExpression"] == "cron(0 4 * * ? *)"
    ((condition, copy, otherwise),) = (each["Fn::If"] for each in rule["CopyActions"])
    assert condition == "HasCopies"
    assert copy["DestinationBackupVaultArn"] == {"Ref": "CopyVault"}
    assert otherwise == {"Ref": "AWS::NoValue"}
    selections = template("backup")["Resources"]
    (tag,) = selections["Databases"]["Properties"]["BackupSelection"]["ListOfTags"]
    (mark,) = one("AWS::RDS::DBInstance")["Tags"]
    assert (tag["ConditionKey"], tag["ConditionValue"]) == (mark["Key"], mark["Value"])
    (bucket,) = selections["Files"]["Properties"]["BackupSelection"]["Resources"]
    assert bucket["Fn::Sub"].endswith(":s3:::${Bucket}")
    assert one("AWS::Backup::BackupVault")["EncryptionKeyArn"] == {"Ref": "Key"}
    assert template("backup")["Resources"]["Vault"]["DeletionPolicy"] == "Retain"


def test_only_steps_reach_file_systems_and_a_vllm_server():
    groups = dict(resources("AWS::EC2::SecurityGroup"))
    jobs = {"Ref": "JobSecurityGroup"}
    (to_server,) = groups["network.VllmSecurityGroup"]["SecurityGroupIngress"]
    assert (to_server["FromPort"], to_server["SourceSecurityGroupId"]) == (8000, jobs)
    mounts = groups["network.FileSystemSecurityGroup"]["SecurityGroupIngress"]
    assert {rule["FromPort"] for rule in mounts} == {2049}
    assert [rule["SourceSecurityGroupId"] for rule in mounts] == [
        jobs,
        {"Ref": "VllmSecurityGroup"},
    ]
    ways = {rule["FromPort"] for rule in groups["network.JobSecurityGroup"]["SecurityGroupEgress"]}
    assert ways == {443, 8443, 2049, 8000}


def test_databases_are_encrypted_private_and_kept():
    database = one("AWS::RDS::DBInstance")
    assert database["StorageEncrypted"] is True
    assert database["PubliclyAccessible"] is False
    assert database["DeletionProtection"] is True
    assert database["BackupRetentionPeriod"] == 30
    # AWS upgrades the minor version; a number here would ask for the way back.
    assert database["AutoMinorVersionUpgrade"] is True
    assert re.fullmatch(r"\d+", database["EngineVersion"])
    family = one("AWS::RDS::DBParameterGroup")["Family"]
    assert family == f"postgres{database['EngineVersion']}"
    assert template("database")["Resources"]["Database"]["DeletionPolicy"] == "Snapshot"
    assert one("AWS::RDS::DBParameterGroup")["Parameters"]["rds.force_ssl"] == "1"


def test_servers_answer_over_tls_only():
    listeners = list(resources("AWS::ElasticLoadBalancingV2::Listener"))
    assert len(listeners) == 2
    for _, listener in listeners:
        assert listener["Protocol"] == "HTTPS"
        assert listener["SslPolicy"] == "ELBSecurityPolicy-TLS13-1-2-2021-06"


def test_no_password_is_written_down():
    for name, task in resources("AWS::ECS::TaskDefinition"):
        (container,) = task["ContainerDefinitions"]
        for variable in container.get("Environment", []):
            assert not re.search("PASSW|PSWD|SECRET|KEY|TOKEN", variable["Name"]), name
    password = one("AWS::RDS::DBInstance")["MasterUserPassword"]["Fn::Sub"]
    assert password.startswith("{{resolve:secretsmanager:")
    for name, secret in resources("AWS::SecretsManager::Secret"):
        assert "SecretString" not in secret, name


def test_every_statement_on_all_resources_has_a_reason():
    found = set()
    for path in TEMPLATES:
        for name, resource in template(path.stem)["Resources"].items():
            for each in statements(resource.get("Properties")):
                named = each.get("Resource")
                if each["Effect"] == "Allow" and "*" in ([named] if str(named) == named else []):
                    what = each.get("Sid", each["Action"])
                    if isinstance(what, list):
                        assert all(re.match("batch:(Describe|List)", action) for action in what)
                        what = "batch:Describe*, ListJobs"
                    found.add(f"{path.stem}.{name} {what}")
                assert not (isinstance(named, list) and "*" in named)
    assert found == set(REASONS)


def test_no_statement_of_a_role_allows_all_actions_of_a_service():
    policies = [*resources("AWS::IAM::Role"), *resources("AWS::IAM::ManagedPolicy")]
    assert len(policies) > 10
    for name, properties in policies:
        for each in statements(properties):
            actions = [each["Action"]] if isinstance(each["Action"], str) else each["Action"]
            assert not [action for action in actions if "*" in action], name


def test_only_services_and_people_by_their_duty_become_a_role():
    people = {}
    for name, role in resources("AWS::IAM::Role"):
        for each in statements(role["AssumeRolePolicyDocument"]):
            (kind,) = each["Principal"]
            if kind != "Service":
                people[name] = each["Principal"]
    assert people == {
        "roles.RegisterRole": {"AWS": {"Ref": "Operator"}},
        "roles.DeployRole": {"AWS": {"Ref": "Deployer"}},
    }


@pytest.mark.parametrize("duty", ["retrain", "train", "judge", "register", "consumer"])
def test_a_pod_of_eks_becomes_the_role_of_its_account_only(duty: str):
    role = template("roles")["Resources"][f"{duty.title()}Role"]["Properties"]
    (pods,) = [
        each
        for each in statements(role["AssumeRolePolicyDocument"])
        if each["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    ]
    assert pods["Action"] == ["sts:AssumeRole", "sts:TagSession"]
    assert pods["Condition"] == {
        "StringEquals": {
            "aws:SourceAccount": {"Ref": "AWS::AccountId"},
            "aws:RequestTag/kubernetes-namespace": "rlhf",
            "aws:RequestTag/kubernetes-service-account": f"rlhf-{duty}",
        }
    }
    accounts = (ROOT / "infra" / "kubernetes" / "service-accounts.yaml").read_text()
    assert f"  name: rlhf-{duty}\n" in accounts


def test_a_machine_joins_its_cluster_and_nothing_else():
    role = template("batch")["Resources"]["InstanceRole"]["Properties"]
    (policy,) = role["ManagedPolicyArns"]
    assert policy["Fn::Sub"].endswith("/AmazonEC2ContainerServiceforEC2Role")
    assert "Policies" not in role


def test_a_failed_stopped_or_late_run_reaches_the_topic():
    rule = template("alarms")["Resources"]["RunFailed"]["Properties"]
    assert set(rule["EventPattern"]["detail"]["status"]) == {"FAILED", "TIMED_OUT", "ABORTED"}
    machines = json.dumps(rule["EventPattern"]["detail"]["stateMachineArn"])
    assert "${RetrainMachine}" in machines
    assert "${TrainingMachine}" in machines
    assert [target["Arn"] for target in rule["Targets"]] == [{"Ref": "Topic"}]
    publishers = [
        each["Principal"]["Service"]
        for each in one("AWS::SNS::TopicPolicy")["PolicyDocument"]["Statement"]
        if each["Effect"] == "Allow"
    ]
    assert set(publishers) == {"events.amazonaws.com", "budgets.amazonaws.com"}


def test_a_skipped_check_of_checkov_has_a_reason():
    skipped = {
        skip["id"]: skip["comment"]
        for path in TEMPLATES
        for resource in template(path.stem)["Resources"].values()
        for skip in resource.get("Metadata", {}).get("checkov", {}).get("skip", [])
    }
    assert set(skipped) == {"CKV_AWS_18", "CKV_AWS_91", "CKV_AWS_118", "CKV_AWS_161"}
    assert all(len(reason.split()) > 5 for reason in skipped.values())


def test_the_folder_can_be_overseen():
    assert len(list(FOLDER.iterdir())) <= 16


def test_mounted_folders_are_volumes_of_the_image():
    """On Fargate, a folder that the image does not declare belongs to root."""
    dockerfile = (ROOT / "infra" / "mlflow" / "Dockerfile").read_text()
    (volumes,) = re.findall(r"^VOLUME (.+)$", dockerfile, re.M)
    mounted = [
        point["ContainerPath"]
        for kind, task in resources("AWS::ECS::TaskDefinition")
        if kind.startswith("tracking.")
        for container in task["ContainerDefinitions"]
        for point in container.get("MountPoints", [])
    ]
    assert mounted and set(mounted) == set(json.loads(volumes))
