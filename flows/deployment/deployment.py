"""A deployment: where, when, with which settings and on which machines the flows run."""

import re
from dataclasses import dataclass, field
from typing import Literal

from deployment.resources import StepResources
from ppo_core.config.checks import check_fields, require
from ppo_core.errors import ConfigError
from ppo_core.io.validation import NotNegative

TOPIC = re.compile(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[\w-]+")
"""Form of the ARN of a topic of SNS."""

MAX_NAME_CHARACTERS = 45
"""Length of a name that Metaflow leaves as it is. Of a longer one, Argo would get a digest, and the
flow Retrain could not tell the name of the flow RLHF from its own."""


JUDGING_STEP = "evaluate_win_rate"
"""The step that asks the judge."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When the flow Retrain starts by itself; without both, a person starts it."""

    cron: str = ""
    """Times: minute, hour, day of the month, month and day of the week; for Step Functions as
    EventBridge reads them, with a sixth field for the year. Days of the week by name: MON."""

    timezone: str = ""
    """Time zone of `cron`, such as Europe/Berlin; empty for UTC. Argo only."""

    event: str = ""
    """Name of an event of Argo Events at which the flow starts. Argo only."""

    def __post_init__(self) -> None:
        """Raise if a timezone has no times."""
        require(self, "timezone", bool(self.cron or not self.timezone), "empty without cron")


@dataclass(frozen=True, kw_only=True)
class Alarms:
    """Who receives alarms."""

    topic: str = ""
    """ARN of a topic of SNS; empty for no messages."""

    gpu_hours: NotNegative = 0.0
    """GPU hours of a run from which on it raises an alarm; 0 for any number."""

    def __post_init__(self) -> None:
        """Raise if the topic is none, or the budget is negative."""
        check_fields(self)
        is_topic = not self.topic or TOPIC.fullmatch(self.topic) is not None
        require(self, "topic", is_topic, "an ARN, arn:aws:sns:REGION:ACCOUNT:NAME")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A deployment of both flows; without values, the flows are not deployed.

    Raises:
        ConfigError: a value is missing or out of range.
    """

    scheduler: Literal["", "argo", "step-functions"] = ""
    """Scheduler that runs the flows."""

    settings: str = ""
    """Settings file of the runs; a relative path starts at the folder of the deployment file."""

    project: str = ""
    """Name that the flows share at the scheduler: small letters, digits and underscores."""

    branch: str = ""
    """A second deployment of the same project, such as staging; empty for the only one."""

    namespace: str = ""
    """Namespace of Kubernetes; empty for METAFLOW_KUBERNETES_NAMESPACE. Argo only."""

    image: str = ""
    """Image of all steps without an image of their own. Name it by its digest, so that what was
    checked is what runs."""

    timeout_hours: NotNegative = 168.0
    """Time limit of a run of a flow in hours, with the time in queues, after which the scheduler
    stops it; 0 for none. Without one, a job that never starts holds a run of Step Functions for a
    year, and every schedule finds its lease taken."""

    schedule: Schedule = field(default_factory=Schedule)
    """When the flow Retrain starts."""

    alarms: Alarms = field(default_factory=Alarms)
    """Who is told."""

    defaults: StepResources = field(default_factory=StepResources)
    """What a step gets whose own table does not say otherwise."""

    retrain: StepResources = field(default_factory=StepResources)
    """What the steps of the flow Retrain get; names missing here come from `defaults`."""

    steps: dict[str, StepResources] = field(default_factory=dict)
    """What the steps of the flow RLHF get; names missing here come from `defaults`."""

    def __post_init__(self) -> None:
        """Raise if a name is none, or too long, or a time limit out of range."""
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
        """Return what a step of the flow RLHF gets."""
        return self.steps.get(step, self.defaults)

    def image_of(self, resources: StepResources) -> str:
        """Return the image of a step."""
        return resources.image or self.image


def deployed_name(flow: str, project: str, branch: str) -> str:
    """Return the name of a deployed flow, as Metaflow's @project makes it for production."""
    return ".".join([project, "prod", *([branch] if branch else []), flow])
