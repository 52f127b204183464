"""Refuse settings of a deployment that the scheduler does not support, with a remedy for each."""

import re
from collections.abc import Iterator
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from deployment.deployment import Deployment
from deployment.step_settings import StepResources
from ppo_core.errors import ConfigError

BATCH_MACHINES = (
    "On AWS Batch, the job queue selects the machines. Set queue to a queue with such machines"
)

NOT_OF_STEP_FUNCTIONS = {
    "gpu_type": BATCH_MACHINES,
    "node_selector": BATCH_MACHINES,
    "tolerations": BATCH_MACHINES,
    "disk_gib": (
        "A job uses its machine's disk. Set the disk size in the compute environment of AWS Batch"
    ),
    "efa": "Step Functions starts one machine per step, so EFA has no use. Deploy with argo",
    "service_account": "Rights on AWS Batch come from a role of IAM. Name it: role",
}
"""Setting of a step -> what to do instead on Step Functions."""

NOT_OF_ARGO = {
    "role": "Rights on Kubernetes come from a service account. Name it: service_account",
    "queue": "Kubernetes has no job queues. Choose nodes: node_selector, tolerations",
}
"""Setting of a step -> what to do instead on Argo."""

SECRET_OF_KUBERNETES = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
SECRET_OF_AWS = re.compile(r"arn:aws[a-z-]*:secretsmanager:[\w:/+.@-]+|[\w/+.@-]+")
ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")
EFS = re.compile(r"fs-[0-9a-f]+")

CRON_FIELDS = {"argo": 5, "step-functions": 6}


def refuse_unsupported(deployment: Deployment) -> None:
    """Raise if the scheduler does not support a setting of a deployment.

    Raises:
        ConfigError: a setting is not supported; the message names the remedy.
    """
    if deployment.scheduler == "step-functions":
        _refuse_argo_only(deployment)
    _check_cron(deployment)
    _check_time_limits(deployment)
    for place, resources in _places(deployment):
        _check_step(deployment, place, resources)


def _places(deployment: Deployment) -> Iterator[tuple[str, StepResources]]:
    yield "defaults", deployment.defaults
    yield "retrain", deployment.retrain
    yield from ((f"steps.{name}", one) for name, one in deployment.steps.items())


def _refuse_argo_only(deployment: Deployment) -> None:
    schedule = deployment.schedule
    if schedule.timezone:
        raise ConfigError(
            f"schedule.timezone={schedule.timezone!r} is not possible with step-functions: "
            "EventBridge reads cron in UTC. Write the hour in UTC, and remove timezone."
        )
    if schedule.event:
        raise ConfigError(
            f"schedule.event={schedule.event!r} is not possible with step-functions: only Argo "
            "starts flows at events. Set schedule.cron: a start ends at once if nothing is new."
        )
    if deployment.namespace:
        raise ConfigError(
            f"namespace={deployment.namespace!r} is not possible with step-functions, which has "
            "no namespaces. Remove namespace: branch tells deployments apart."
        )


def _check_time_limits(deployment: Deployment) -> None:
    """Raise if a run has less time than one attempt of a step may take."""
    minutes = 60 * deployment.timeout_hours
    for place, resources in _places(deployment):
        if minutes and resources.timeout_minutes > minutes:
            raise ConfigError(
                f"timeout_hours={deployment.timeout_hours:g} stops a run after {minutes:g} "
                f"minutes, but {place}.timeout_minutes={resources.timeout_minutes} allows one "
                f"attempt {resources.timeout_minutes} minutes. Raise timeout_hours above the sum "
                "of the steps, their retries and their waiting."
            )


def _check_cron(deployment: Deployment) -> None:
    cron, timezone = deployment.schedule.cron, deployment.schedule.timezone
    if not cron:
        return
    fields, count = cron.split(), CRON_FIELDS[deployment.scheduler]
    if len(fields) != count:
        examples = {"argo": "0 3 * * MON", "step-functions": "0 3 ? * MON *"}
        raise ConfigError(
            f"schedule.cron={cron!r} has {len(fields)} fields, and {deployment.scheduler} reads "
            f"{count}. Write it as {examples[deployment.scheduler]!r}, every Monday at 3."
        )
    if re.search(r"(?<!#)\d", fields[4]):
        raise ConfigError(
            f"schedule.cron={cron!r} has a number as the day of the week. 1 is Monday for Argo, "
            "and Sunday for EventBridge. Write the name: MON."
        )
    if deployment.scheduler == "step-functions" and [fields[2], fields[4]].count("?") != 1:
        raise ConfigError(
            f"schedule.cron={cron!r} must name either a day of the month or a day of the week. "
            "EventBridge reads one of them: write ? for the other."
        )
    if fields[5:] not in ([], ["*"]):
        raise ConfigError(
            f"schedule.cron={cron!r} names a year, after which nothing would start. Write *."
        )
    try:
        ZoneInfo(timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ConfigError(
            f"schedule.timezone={timezone!r} is unknown. Write a name such as Europe/Berlin."
        ) from error


def _check_step(deployment: Deployment, place: str, resources: StepResources) -> None:
    scheduler = deployment.scheduler
    on_aws = scheduler == "step-functions"
    for name, instead in (NOT_OF_STEP_FUNCTIONS if on_aws else NOT_OF_ARGO).items():
        if value := getattr(resources, name):
            raise ConfigError(
                f"{place}.{name}={value!r:.80} is not possible with {scheduler}. {instead}."
            )
    for secret in resources.secrets:
        if not (SECRET_OF_AWS if on_aws else SECRET_OF_KUBERNETES).fullmatch(secret):
            raise ConfigError(
                f"{place}.secrets has a text that is not a name of a secret of {scheduler}; it is "
                "not shown here. Store the secret at the scheduler, and write its name."
            )
    if resources.role and not ROLE.fullmatch(resources.role):
        raise ConfigError(
            f"{place}.role={resources.role!r} is not the ARN of a role, such as "
            "arn:aws:iam::ACCOUNT:role/NAME."
        )
    if on_aws and (wrong := [one for one in resources.mounts if not EFS.fullmatch(one)]):
        raise ConfigError(
            f"{place}.mounts names {wrong[0]!r}, which is not an id of an EFS file system. Write "
            "one: fs-0123456789abcdef0."
        )
    if not deployment.image_of(resources):
        raise ConfigError(f"{place} has no image. Set image at the top of the deployment file.")
