"""What a scheduler says about a deployed flow."""

from dataclasses import dataclass, field
from pathlib import Path

from deployment.flow_commands import DeploymentFiles
from pipeline.inputs.lineage import git_state
from ppo_core.errors import ConfigError
from ppo_core.io.folder_cache import digest_of
from ppo_core.io.text_files import read_toml_file

COMMIT, CHANGES = "git_commit", "git_changes"
SETTINGS, DEPLOYMENT = "settings_file", "deployment_file"
"""Names of Metaflow's tags of a deployed flow and of its runs."""


@dataclass(frozen=True, kw_only=True)
class DeployedFlow:
    """A flow as a scheduler has it."""

    name: str
    """Name at the scheduler."""

    deployed_at: str
    """Time of the deployment."""

    tags: dict[str, str] = field(default_factory=dict)
    """What `tags_of` returned at the deployment."""

    token: str = ""
    """Metaflow's production token, by which others may change the deployment."""

    cron: str = ""
    """Times at which the scheduler starts it; empty for none."""

    timezone: str = ""
    """Time zone of these times; empty for UTC."""

    last_run: str = ""
    """Last run; empty for none."""

    result: str = ""
    """Its result so far, and the time of it."""


def tags_of(files: DeploymentFiles) -> dict[str, str]:
    """Return the tags that a deployed flow and its runs get: code, settings, deployment.

    The digests cover the files' values: comments and the order of names change nothing.

    Raises:
        ConfigError: the settings file cannot be read.
    """
    commit, changes = git_state(Path(__file__))
    return {
        COMMIT: commit,
        CHANGES: changes,
        SETTINGS: digest_of(read_toml_file(files.settings, ConfigError)),
        DEPLOYMENT: digest_of(read_toml_file(files.path, ConfigError)),
    }
