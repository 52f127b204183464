"""Refuse a run whose machine or MLflow server would make a later step fail or lose results."""

import os
from importlib.util import find_spec

from pipeline.settings.environment import runs_remotely
from ppo_core.errors import ConfigError

PACKAGES = (
    "accelerate",
    "boto3",
    "cyclonedx",
    "datasets",
    "deepspeed",
    "filelock",
    "httpx2",
    "huggingface_hub",
    "jinja2",
    "mlflow",
    "numpy",
    "psutil",
    "pydantic",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "statsmodels",
    "tenacity",
    "tomli_w",
    "torch",
    "tqdm",
    "transformers",
    "yaml",
)
"""Packages that the steps import."""

MOST_PROXIED_BYTES = 10**9
"""Maximum size of a policy whose files pass through MLflow's server. For 1 GB, the server needs
more than five minutes and 30 GB of memory (mlflow issue 22665)."""

BYTES_PER_PARAMETER = 2
"""Bytes of a weight in bf16, the smallest form in which a policy is registered."""

PROXIED = "mlflow-artifacts:"
"""Beginning of the address of artifacts that pass through the server."""


def check_machine() -> None:
    """Raise if a scheduler's machine lacks a package, or the steps share no MLflow server.

    Raises:
        ConfigError: a package is missing, MLFLOW_TRACKING_URI is not set, or MLFLOW_TRACKING_URI or
            MLFLOW_REGISTRY_URI is a file of this machine.
    """
    if not runs_remotely():
        return
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"The image of this step has no package {', '.join(missing)}, so a later step would "
            "fail. Name an image that is built from infra/Dockerfile.cuda or infra/Dockerfile.cpu."
        )
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        uri = os.environ.get(variable, "")
        is_used = uri or variable == "MLFLOW_TRACKING_URI"
        if is_used and _is_file(uri):
            raise ConfigError(
                f"{variable}={uri!r} would give each step an MLflow of its own on a machine that "
                "is deleted after the step, and its runs and the registered version would be lost. "
                f"Set {variable} to the address of an MLflow server, for example with @environment."
            )


def _is_file(uri: str) -> bool:
    """Return whether MLflow stores its data in a file or folder of this machine.

    An address without a scheme, such as `mlruns`, is a folder, and so is an empty address.
    """
    scheme = uri.partition(":")[0]
    if scheme == uri:
        return not uri.startswith("databricks")
    return "/" in scheme or scheme.startswith(("sqlite", "file"))


def refuse_proxied_artifacts(root: str, policy: str) -> None:
    """Raise if a large policy would be registered through MLflow's server.

    Args:
        root: address of the folder with the artifacts of all runs.
        policy: folder or hub id of the policy.

    Raises:
        ConfigError: the server passes on artifacts, and the policy exceeds MOST_PROXIED_BYTES.
    """
    if not root.startswith(PROXIED):
        return
    from pipeline.tracking.mlflow_client import EXPERIMENT
    from ppo_core.models.loading import count_parameters

    policy_bytes = BYTES_PER_PARAMETER * count_parameters(policy)
    if policy_bytes > MOST_PROXIED_BYTES:
        raise ConfigError(
            f"Artifacts pass through the MLflow server ({root}), which cannot transfer a policy of "
            f"{policy_bytes / 1e9:.1f} GB, so the registration would fail after the training. "
            "Start the server with --no-serve-artifacts and --default-artifact-root "
            f"s3://BUCKET/PREFIX. Then rename the experiment '{EXPERIMENT}' in MLflow, which keeps "
            f"its old artifact root; the next run creates a new '{EXPERIMENT}'."
        )
