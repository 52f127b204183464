"""Settings of a deployment: scheduler, schedule, alarms, and the resources of each step."""

import re
from dataclasses import dataclass, field
from typing import Literal

from deployment.step_settings import StepResources
from ppo_core.config.field_checks import check_fields, require
from ppo_core.errors import ConfigError
from ppo_core.io.validation import NotNegative

TOPIC = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[\w-]+")
"""Pattern of the ARN of an SNS topic."""

MAX_NAME_CHARACTERS = 45
"""Maximum length of the name of a deployed flow. Metaflow replaces the end of a longer name with a
digest, and then Retrain cannot derive the name of the flow RLHF from its own name."""

JUDGING_STEP = "evaluate_win_rate"
"""The step whose secrets include the judge's key."""

TRAINING_STEP = "train_policy"
"""The step whose secrets include the key of a language model that is used as a reward."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When the scheduler starts the flow Retrain; without cron and event, only people start it."""

    cron: str = ""
    """Times of the start: minute, hour, day of the month, month and day of the week. Step Functions
    needs EventBridge's format, with the year as a sixth field. Days of the week are names: MON."""

    timezone: str = ""
    """Time zone of `cron`, such as Europe/Berlin; empty for UTC. Argo only."""

    event: str = ""
    """Name of an event of Argo Events at which the flow starts. Argo only."""

    def __post_init__(self) -> None:
        """Raise if there is a timezone, but no cron."""
        require(self, "timezone", bool(self.cron or not self.timezone), "empty without cron")


@dataclass(frozen=True, kw_only=True)
class Alarms:
    """Who receives alarms, and the budget of a run."""

    topic: str = ""
    """ARN of an SNS topic; empty for no messages."""

    gpu_hours: NotNegative = 0.0
    """Budget of a run in GPU hours, above which an alarm is sent; 0 for no limit."""

    def __post_init__(self) -> None:
        """Raise if the topic is not an ARN, or the budget is negative."""
        check_fields(self)
        is_topic = not self.topic or TOPIC.fullmatch(self.topic) is not None
        require(self, "topic", is_topic, "an ARN, arn:aws:sns:REGION:ACCOUNT:NAME")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Settings of a deployment of both flows; the defaults stand for a run that is not deployed.

    Raises:
        ConfigError: a value is out of range, or a name has wrong characters or is too long.
    """

    scheduler: Literal["", "argo", "step-functions"] = ""
    """Scheduler that runs the flows."""

    settings: str = ""
    """Settings file of the runs; a relative path starts at the folder of the deployment file."""

    project: str = ""
    """First part of the names of both flows: small letters, digits and underscores."""

    branch: str = ""
    """Name of a further deployment of the same project, such as staging; empty for the main one."""

    namespace: str = ""
    """Namespace of Kubernetes; empty for METAFLOW_KUBERNETES_NAMESPACE. Argo only."""

    image: str = ""
    """Image of all steps without an image of their own. Name it by its digest, so that the image
    that was checked is the image that runs."""

    timeout_hours: NotNegative = 168.0
    """Time limit in hours of a run of a flow, including the time in queues; the scheduler stops a
    run that takes longer. 0 for no limit: on Step Functions, a job that never starts then keeps its
    run alive for a year."""

    schedule: Schedule = field(default_factory=Schedule)
    """When the flow Retrain starts."""

    alarms: Alarms = field(default_factory=Alarms)
    """Who receives alarms."""

    defaults: StepResources = field(default_factory=StepResources)
    """Resources of a step that has no table, and values for the names that a table leaves out."""

    retrain: StepResources = field(default_factory=StepResources)
    """Resources of the steps of the flow Retrain; missing names come from `defaults`."""

    steps: dict[str, StepResources] = field(default_factory=dict)
    """Resources of the steps of the flow RLHF; missing names come from `defaults`."""

    def __post_init__(self) -> None:
        """Raise if a name has wrong characters or is too long, or a value is out of range."""
        check_fields(self)
        for name in ("project", "branch"):
            is_name = re.fullmatch(r"[a-z0-9_]*", getattr(self, name)) is not None
            require(self, name, is_name, "small letters, digits and underscores")
        own = deployed_name("Retrain", self.project, self.branch)
        if len(own) > MAX_NAME_CHARACTERS:
            raise ConfigError(
                f"project={self.project!r} and branch={self.branch!r} give the name {own!r}, of "
                f"{len(own)} characters. Metaflow would shorten it to {MAX_NAME_CHARACTERS}, and "
                "the flow Retrain would not find the flow RLHF. Shorten project or branch."
            )

    def resources_of(self, step: str) -> StepResources:
        """Return the resources of a step of the flow RLHF."""
        return self.steps.get(step, self.defaults)

    def image_of(self, resources: StepResources) -> str:
        """Return the image of a step with these resources."""
        return resources.image or self.image


def deployed_name(flow: str, project: str, branch: str) -> str:
    """Return the name that Metaflow's @project gives to a production flow."""
    return ".".join([project, "prod", *([branch] if branch else []), flow])
