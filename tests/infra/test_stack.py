"""The stacks on moto's CloudFormation: created, updated, and their references resolved.

moto skips budgets and the policies of topics and queues, and checks few properties; so these tests
show that references and their order are right, and test_templates.py the rest.
"""

import re
from typing import Any

from tests.helpers.aws.stacks import Cloud, parameters, template
from tests.infra.conftest import STACK


def machines_of(cloud: Cloud, queue: str) -> Any:
    """Return the machines of the compute environment of a queue."""
    batch = cloud.client("batch")
    (found,) = batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
    names = [one["computeEnvironment"] for one in found["computeEnvironmentOrder"]]
    (made,) = batch.describe_compute_environments(computeEnvironments=names)["computeEnvironments"]
    return made["computeResources"]


def test_a_deployment_finds_what_it_needs_in_the_outputs(deployed: Cloud):
    outputs = deployed.outputs(STACK)
    assert set(outputs) == set(template("root")["Outputs"])
    assert all(value and not re.search(r"\$\{|PHYSICAL|None", value) for value in outputs.values())
    account, region = "123456789012", "us-east-1"
    assert outputs["DataStore"] == f"s3://rlhf-{account}-{region}/metaflow"
    assert outputs["MlflowUrl"] == "https://mlflow.rlhf.example.com"
    assert outputs["MetadataUrl"] == "https://metadata.rlhf.example.com:8443"
    assert outputs["RegisterRole"] == f"arn:aws:iam::{account}:role/rlhf-register"
    deployed.client("s3").head_bucket(Bucket=outputs["Bucket"])
    deployed.client("sns").get_topic_attributes(TopicArn=outputs["AlarmTopic"])
    assert machines_of(deployed, outputs["CpuQueue"])["instanceTypes"] == ["m7i"]
    for gpu, machines in {"L4": ["g6.2xlarge", "g6.4xlarge"], "A100": ["p4d.24xlarge"]}.items():
        for queue in (f"{gpu}Queue", f"{gpu}SpotQueue"):
            assert machines_of(deployed, outputs[queue])["instanceTypes"] == machines


def test_both_servers_are_behind_the_balancer(deployed: Cloud):
    balancers = deployed.client("elbv2")
    (balancer,) = balancers.describe_load_balancers()["LoadBalancers"]
    listeners = balancers.describe_listeners(LoadBalancerArn=balancer["LoadBalancerArn"])
    assert {one["Port"] for one in listeners["Listeners"]} == {443, 8443}
    ecs = deployed.client("ecs")
    services = ecs.list_services(cluster=deployed.outputs(STACK)["Cluster"])["serviceArns"]
    assert len(services) == 2
    databases = deployed.client("rds").describe_db_instances()["DBInstances"]
    assert {one["MasterUsername"] for one in databases} == {"mlflow", "metaflow"}
    tasks = ecs.list_task_definitions()["taskDefinitionArns"]
    hosts = set()
    for task in tasks:
        found = ecs.describe_task_definition(taskDefinition=task)["taskDefinition"]
        for variable in found["containerDefinitions"][0]["environment"]:
            if variable["name"] in ("DATABASE_HOST", "MF_METADATA_DB_HOST"):
                hosts.add(variable["value"])
    assert hosts == {one["Endpoint"]["Address"] for one in databases}


def test_a_changed_parameter_arrives_where_it_belongs(deployed: Cloud):
    before = deployed.outputs(STACK)
    (certificate,) = deployed.client("acm").list_certificates()["CertificateSummaryList"]
    changed = parameters() | {
        "Certificate": certificate["CertificateArn"],
        "L4Machines": "g6.xlarge",
        "RetrainMachine": "rlhf.test.Retrain",
    }
    deployed.update(STACK, changed)
    after = deployed.outputs(STACK)
    assert machines_of(deployed, after["L4SpotQueue"])["instanceTypes"] == ["g6.xlarge"]
    assert machines_of(deployed, after["H100Queue"])["instanceTypes"] == ["p5.48xlarge"]
    assert machines_of(deployed, after["CpuQueue"])["instanceTypes"] == ["m7i"]
    role = after["EventBridgeRole"].rpartition("/")[2]
    policy = deployed.client("iam").get_role_policy(RoleName=role, PolicyName="start-retrain")
    assert "stateMachine:rlhf.test.Retrain" in str(policy["PolicyDocument"])
    assert after["Bucket"] == before["Bucket"]
    assert after["JudgeKeySecret"] == before["JudgeKeySecret"]
