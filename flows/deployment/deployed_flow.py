"""The state of a deployed flow at its scheduler: tags, schedule and last run."""

from dataclasses import dataclass, field
from pathlib import Path

from deployment.deploy_flow import DeploymentFiles
from pipeline.inputs.lineage import git_state
from ppo_core.errors import ConfigError
from ppo_core.io.folder_cache import digest_of
from ppo_core.io.text_files import read_toml_file

COMMIT, CHANGES = "git_commit", "git_changes"
SETTINGS, DEPLOYMENT = "settings_file", "deployment_file"
DEPLOYED = "deployed_at"
"""Names of the Metaflow tags that a deployed flow and its runs get."""


@dataclass(frozen=True, kw_only=True)
class DeployedFlow:
    """The state of a deployed flow at its scheduler."""

    name: str
    """Name at the scheduler."""

    deployed_at: str
    """Time of the deployment."""

    tags: dict[str, str] = field(default_factory=dict)
    """The result of `tags_of` when the flow was deployed, and the tag DEPLOYED."""

    token: str = ""
    """Metaflow's production token, with which other users may change the deployment."""

    cron: str = ""
    """Times at which the scheduler starts the flow, in cron format; empty without a schedule. Argo
    may have several, separated by "; "."""

    timezone: str = ""
    """Time zone of `cron`; empty for UTC."""

    last_run: str = ""
    """Name of the last run; empty if there is none."""

    result: str = ""
    """Status of the last run, with its end time, or with its start time while it runs."""

    running: str = ""
    """Name of a run that has not ended; empty if there is none."""


def tags_of(files: DeploymentFiles) -> dict[str, str]:
    """Return the tags of a deployed flow and its runs.

    The tags are the commit of the code, whether tracked files differ from this commit, and the
    digests of the settings file and of the deployment file. The digests depend only on the values
    in the files, not on comments or the order of names.

    Raises:
        ConfigError: one of the two files cannot be read.
    """
    commit, changes = git_state(Path(__file__))
    return {
        COMMIT: commit,
        CHANGES: changes,
        SETTINGS: digest_of(read_toml_file(files.settings, ConfigError)),
        DEPLOYMENT: digest_of(read_toml_file(files.path, ConfigError)),
    }
