"""`python -m pipeline.judges.rubric JOB`: PPO whose rewards include language models."""

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_core.__main__ import run_process
from ppo_core.config.reward_names import NamedReward
from ppo_core.io.user_code import LoadedFunction

if TYPE_CHECKING:
    from pipeline.judges.rubric.job import LanguageModels


@cache
def _language_models(folder: Path) -> "LanguageModels":
    # Imported here, because `job` imports torch, and a wrong flag should be reported at once.
    from pipeline.judges.rubric.job import load_job

    return load_job(folder)


def load(one: NamedReward) -> LoadedFunction:
    """Return a language model as a function of prompts and responses."""
    return _language_models(Path(sys.argv[1]).parent).load(one)


if __name__ == "__main__":
    run_process(load)
