"""Read a deployment file strictly: refuse unknown names, wrong types and secrets."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from deployment.deployment import Deployment
from deployment.refusals import refuse_unsupported
from deployment.step_settings import StepResources
from pipeline.settings.make_settings import names_by_section, read_section
from pipeline.settings.overrides import merge_tables
from pipeline.settings.unknown_names import describe_unknown_setting
from ppo_core.config.field_checks import refuse_secrets
from ppo_core.errors import ConfigError

STEPS = (
    "start",
    "load_policy",
    "load_reward_model",
    "validate_reward_model",
    "train_policy",
    "evaluate_win_rate",
    "register",
    "end",
)
"""Steps of the flow RLHF, in their order."""

STEPS_OF_SEVERAL_MACHINES = ("join_policy", "share_policy", "join_reward_model", "join_trained")
"""Additional steps of the flow RLHF if num_nodes is above 1 in the settings."""

REQUIRED = ("scheduler", "settings", "project")

SECRETS_OF_A_DEPLOYMENT = (
    "store it as a secret of Kubernetes or of AWS Secrets Manager; its key is the name of the "
    "environment variable. Then name that secret in `secrets` of the steps that need it"
)

KNOWN = {
    **names_by_section(Deployment),
    "steps.": [*STEPS, *STEPS_OF_SEVERAL_MACHINES],
    **{
        f"steps.{step}.": [one.name for one in dataclasses.fields(StepResources)]
        for step in (*STEPS, *STEPS_OF_SEVERAL_MACHINES)
    },
}
"""Section, written with a dot at its end -> the names that the section may contain."""


def read_deployment(table: Mapping[str, Any]) -> Deployment:
    """Return the deployment that a parsed TOML file describes; `Deployment()` for an empty file.

    Raises:
        ConfigError: a name is unknown; a value is missing, has the wrong type, is out of range or
            contains a secret; or the scheduler does not support a setting.
    """
    if not table:
        return Deployment()
    refuse_secrets(table, instead=SECRETS_OF_A_DEPLOYMENT)
    if missing := [name for name in REQUIRED if not table.get(name)]:
        raise ConfigError(
            f"The file lacks {', '.join(missing)}. infra/deployments has an example for each "
            "scheduler."
        )
    defaults = _section(table, "defaults")
    retrain = merge_tables(defaults, _section(table, "retrain"))
    whole = {**table, "retrain": retrain, "steps": {}}
    # Read the defaults first, so that the message about an error in them names [defaults].
    read_section(StepResources, defaults, "defaults.", KNOWN)
    deployment: Deployment = read_section(Deployment, whole, "", KNOWN)
    steps = {
        name: _read_step(name, own, defaults) for name, own in _section(table, "steps").items()
    }
    deployment = dataclasses.replace(deployment, steps=steps)
    refuse_unsupported(deployment)
    return deployment


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = table.get(name.rpartition(".")[2], {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name}={section!r:.80} must be a section, [{name}].")
    return section


def _read_step(name: str, own: Any, defaults: Mapping[str, Any]) -> StepResources:
    if name not in KNOWN["steps."]:
        raise ConfigError(describe_unknown_setting(name, "steps.", KNOWN))
    table = merge_tables(defaults, _section({name: own}, f"steps.{name}"))
    resources: StepResources = read_section(StepResources, table, f"steps.{name}.", KNOWN)
    return resources
