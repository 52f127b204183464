"""Check the settings file of a deployment without its inputs, which only the first step reads."""

from deployment.deployment import JUDGING_STEP
from deployment.flow_commands import DeploymentFiles
from pipeline.judges.judge_names import read_judges
from pipeline.settings.settings import Settings, make_settings
from ppo_core.errors import ConfigError
from ppo_core.io.text_files import read_toml_file


def check_settings(files: DeploymentFiles) -> Settings:
    """Return the settings of the runs.

    Raises:
        ConfigError: a setting is wrong, or the judge needs a key and the judging step has no
            secret.
    """
    try:
        settings = make_settings(read_toml_file(files.settings, ConfigError), {})
        judges = read_judges(settings.judge) if settings.judge else []
    except ConfigError as error:
        raise ConfigError(f"{files.settings}: {error}") from error
    step = files.deployment.resources_of(JUDGING_STEP)
    has_server = settings.judging.base_url or "OPENAI_BASE_URL" in step.environment
    needs_key = any(judge.kind == "openai" for judge in judges) and not has_server
    if needs_key and not step.secrets:
        raise ConfigError(
            f"judge={settings.judge!r} needs a key, and steps.{JUDGING_STEP} has no secret. Store "
            f"the key as OPENAI_API_KEY in a secret of the scheduler, and name it in "
            f"steps.{JUDGING_STEP}.secrets."
        )
    return settings
