"""Read the settings of a run: first check the names, then read the size of the policy.

Large libraries are imported only to read the size. Therefore a misspelled name is reported at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.judges.judge_names import check_judge_name, check_labeller_name, check_reward_names
from pipeline.preflight.remote_machine import check_machine
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.settings.unknown_names import ONLY_IN_FILE
from pipeline.storage.workspace import is_address, workspace_of
from ppo_core.distributed.process import large_imports
from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package


def read_settings(
    from_file: Mapping[str, Any],
    from_command_line: Mapping[str, Any],
    overrides: Sequence[str],
) -> Settings:
    """Return the settings of a run, with the defaults for the size of its policy.

    For the arguments see `make_settings`.

    Raises:
        ConfigError: see `check_machine`, `make_settings`, `check_judge_and_packages`,
            `check_labeller_name` and `check_reward_names`; or `--set` sets num_nodes.
        ModelError: the policy cannot be read, or is not a model that generates text.
    """
    check_machine()
    given = make_settings(from_file, from_command_line, overrides)
    if given.num_nodes != from_file.get("num_nodes", 1):
        raise ConfigError(f"num_nodes={given.num_nodes} cannot be set by --set. {ONLY_IN_FILE}")
    check_judge_and_packages(given.judge, given.reward_model, given.judging)
    if labeller := given.fresh_pairs.judge:
        check_labeller_name(labeller, given.judge, given.judging.base_url)
    check_reward_names(given.rewards, given.judge, given.judging.base_url)
    policy = _policy_at_hand(given)
    return make_settings(from_file, from_command_line, overrides, parameters=_parameters(policy))


def _policy_at_hand(given: Settings) -> str:
    """Return the folder or hub id of the policy; if the setting is an address, fetch the policy."""
    if not is_address(given.policy):
        return given.policy
    with large_imports():
        from pipeline.preflight.fetch_inputs import fetch_model
    return fetch_model(given.policy, workspace_of(given))


def _parameters(policy: str) -> int:
    """Return the number of parameters of the policy; 0 if a built-in task makes its own policy."""
    if not policy:
        return 0
    with large_imports():
        from ppo_core.models.files.model_folder import check_model_folder
        from ppo_core.models.loading import check_policy_config, count_parameters
    # Check the folder first: the error then says what the folder contains instead of a policy.
    check_model_folder(policy)
    check_policy_config(policy)
    return count_parameters(policy)


def check_judge_and_packages(judge: str, reward_model: str, config: JudgingConfig) -> None:
    """Raise if the judge is misspelled or has no key, or a package for evaluations is missing.

    If `judge` is empty, the run trains the judge, so there is no name to check.

    Raises:
        ConfigError: see `check_judge_name`; or statsmodels is not installed.
    """
    require_package("statsmodels", extra="evaluation", needed_by="The evaluation of a model")
    if judge:
        check_judge_name(judge, reward_model, config.base_url)
