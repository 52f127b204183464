"""Read the settings of a run, and check the judge that they name, before anything else is read.

No large library is imported here, so that a misspelt name is reported at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.judges.judge_names import check_judge_name
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.settings import Settings, make_settings
from ppo_core.errors.packages import require_package


def read_settings(
    from_file: Mapping[str, Any],
    from_command_line: Mapping[str, Any],
    overrides: Sequence[str],
) -> Settings:
    """Return the settings of a run; the arguments are those of `make_settings`.

    Raises:
        ConfigError: see `make_settings` and `check_names`.
    """
    settings = make_settings(from_file, from_command_line, overrides)
    check_names(settings.judge, settings.reward_model, settings.judging)
    return settings


def check_names(judge: str, reward_model: str, config: JudgingConfig) -> None:
    """Raise if the judge is misspelt or has no key, or a package of every evaluation is missing.

    Raises:
        ConfigError: see `check_judge_name`; or statsmodels is not installed.
    """
    require_package("statsmodels", extra="evaluation", needed_by="The evaluation of a model")
    check_judge_name(judge, reward_model, config.base_url)
