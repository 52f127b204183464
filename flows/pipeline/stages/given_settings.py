"""Read the settings of a run, and check the judge that they name, before anything else is read.

No large library is imported here, so that a misspelt name is reported at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.judges.judge_names import check_judge_name
from pipeline.settings.settings import Settings, make_settings


def read_settings(
    from_file: Mapping[str, Any],
    from_command_line: Mapping[str, Any],
    overrides: Sequence[str],
) -> Settings:
    """Return the settings of a run; the arguments are those of `make_settings`.

    Raises:
        ConfigError: see `make_settings`; or the judge is unknown, named twice, or PPO's reward
            model.
    """
    settings = make_settings(from_file, from_command_line, overrides)
    check_judge_name(settings.judge, settings.reward_model)
    return settings
