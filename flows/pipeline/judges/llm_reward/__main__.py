"""`python -m pipeline.judges.llm_reward JOB`: PPO whose rewards include language models."""

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_core.__main__ import run_process

if TYPE_CHECKING:
    from pipeline.judges.llm_reward.job import LanguageModels
    from ppo_core.training.load_rewards import LoadLanguageModel


def loader() -> "LoadLanguageModel":
    """Return a function that loads a language model of the job; its first call reads the job."""

    @cache
    def models() -> "LanguageModels":
        # Imported here, because `job` imports torch, and a wrong flag should be reported at once.
        from pipeline.judges.llm_reward.job import load_job

        return load_job(Path(sys.argv[1]).parent)

    return lambda one: models().load(one)


if __name__ == "__main__":
    run_process(loader())
