"""Settings for a step of a deployed flow: machine, rights, secrets, limits and environment."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from ppo_core.config.field_checks import check_fields, require
from ppo_core.io.validation import Natural, NotNegative, Positive

TAINT = re.compile(
    r"(?P<key>[\w./-]+)(=(?P<value>[\w.-]*))?:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute)"
)
"""Pattern of a taint of a Kubernetes node."""

MAX_RETRIES = 4
"""Largest number of retries for each step that Metaflow allows."""

_Retries = Annotated[int, Field(ge=0, le=MAX_RETRIES, description=f"0 to {MAX_RETRIES}")]


@dataclass(frozen=True, kw_only=True)
class StepResources:
    """Resources of one step.

    Raises:
        ConfigError: a value is out of range.
    """

    image: str = ""
    """Image of the container, with its registry; empty for the image of the deployment."""

    cpu: Positive = 1.0
    """Number of CPU cores."""

    memory_gib: Positive = 4.0
    """Memory in GiB."""

    gpu: Natural = 0
    """Number of GPUs."""

    gpu_type: str = ""
    """Type of the GPUs: the label that NVIDIA's GPU feature discovery gives a node, such as
    NVIDIA-L4. Argo only."""

    disk_gib: NotNegative = 0.0
    """Disk of the container in GiB; 0 for Metaflow's default of 10. Argo only."""

    shared_memory_gib: NotNegative = 0.0
    """Size of /dev/shm in GiB; 0 for the scheduler's default. Trainings with several processes
    need it."""

    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have. Argo only."""

    tolerations: list[str] = field(default_factory=list)
    """Taints of nodes that the step tolerates, written as for `kubectl taint`: KEY:EFFECT or
    KEY=VALUE:EFFECT, such as nvidia.com/gpu:NoSchedule. Argo only."""

    efa: Natural = 0
    """Number of EFA network devices, for trainings on several machines. Argo only."""

    role: str = ""
    """ARN of the IAM role of the step. Step Functions only."""

    service_account: str = ""
    """Service account of the step. Argo only."""

    queue: str = ""
    """Job queue of AWS Batch; empty for METAFLOW_BATCH_JOB_QUEUE. Step Functions only."""

    secrets: list[str] = field(default_factory=list)
    """Names of secrets whose entries become environment variables of the step: names of Kubernetes
    Secrets on Argo, names or ARNs of AWS Secrets Manager on Step Functions."""

    timeout_minutes: Natural = 0
    """Time limit of an attempt in minutes; 0 for Metaflow's default of 5 days."""

    retries: _Retries | None = None
    """Number of further attempts after a failed first attempt, at most 4; None for the number in
    the flow's code. Each further attempt continues from the training's last checkpoint."""

    mounts: dict[str, str] = field(default_factory=dict)
    """Volume -> folder in the container. A volume is the name of a persistent volume claim on Argo,
    and the id of an EFS file system on Step Functions."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the step. Their values are stored in clear text."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        has_type = bool(self.gpu or not self.gpu_type)
        require(self, "gpu_type", has_type, "empty for a step without GPUs")
        are_taints = all(TAINT.fullmatch(one) for one in self.tolerations)
        require(self, "tolerations", are_taints, "taints, such as nvidia.com/gpu:NoSchedule")
        are_folders = all(folder.startswith("/") for folder in self.mounts.values())
        require(self, "mounts", are_folders, "a table of volumes with absolute paths")
