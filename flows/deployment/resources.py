"""What a step of a deployed flow gets: a machine, rights, secrets, limits, and its environment."""

from dataclasses import dataclass, field

from ppo_core.config.checks import require, require_finite

TOLERATION_KEYS = ("effect", "key", "operator", "tolerationSeconds", "value")
"""Names that Kubernetes knows in a toleration."""


@dataclass(frozen=True, kw_only=True)
class StepResources:
    """What one step gets.

    Raises:
        ConfigError: a value is out of range.
    """

    image: str = ""
    """Image of the container, with its registry; empty for the image of the deployment."""

    cpu: float = 1.0
    """Number of CPU cores."""

    memory_gib: float = 4.0
    """Memory in GiB."""

    gpu: int = 0
    """Number of GPUs."""

    gpu_type: str = ""
    """Type of the GPUs, as NVIDIA's feature discovery labels nodes: NVIDIA-L4. Argo only."""

    disk_gib: float = 0.0
    """Disk of the container in GiB; 0 for Metaflow's default of 10. Argo only."""

    shared_memory_gib: float = 0.0
    """Size of /dev/shm in GiB; 0 for the scheduler's default. Trainings with several processes
    need it."""

    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have. Argo only."""

    tolerations: list[dict[str, str | int]] = field(default_factory=list)
    """Taints of nodes that the step tolerates, as in Kubernetes. Argo only."""

    efa: int = 0
    """Number of EFA network devices, for trainings on several machines. Argo only."""

    role: str = ""
    """ARN of the IAM role of the step. Step Functions only."""

    service_account: str = ""
    """Service account of the step. Argo only."""

    queue: str = ""
    """Job queue of AWS Batch; empty for METAFLOW_BATCH_JOB_QUEUE. Step Functions only."""

    secrets: list[str] = field(default_factory=list)
    """Names of secrets whose entries become environment variables of the step: secrets of
    Kubernetes on Argo, names or ARNs of AWS Secrets Manager on Step Functions."""

    timeout_minutes: int = 0
    """Time limit of an attempt in minutes; 0 for Metaflow's default of 5 days."""

    retries: int | None = None
    """Number of attempts after the first one failed; without it, the number that the flow says."""

    mounts: dict[str, str] = field(default_factory=dict)
    """Volume -> folder in the container: persistent volume claims on Argo, ids of EFS file systems
    on Step Functions."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables with values that everyone may read."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        require_finite(self)
        for name in ("cpu", "memory_gib"):
            require(self, name, getattr(self, name) > 0, "above 0")
        for name in ("gpu", "efa", "disk_gib", "shared_memory_gib", "timeout_minutes"):
            require(self, name, getattr(self, name) >= 0, "at least 0")
        require(self, "retries", self.retries >= -1, "at least 0, or -1 for the flow's own number")
        require(
            self, "gpu_type", bool(self.gpu or not self.gpu_type), "empty for a step with gpu=0"
        )
        unknown = sorted({key for each in self.tolerations for key in each} - {*TOLERATION_KEYS})
        known = ", ".join(TOLERATION_KEYS)
        require(self, "tolerations", not unknown, f"tables with the keys {known}")
        folders = self.mounts.values()
        require(self, "mounts", all(one.startswith("/") for one in folders), "absolute folders")
