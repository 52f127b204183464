"""Set up the language models of a PPO training in its processes; count their calls and tokens."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.inputs.run_rewards import RunRewards
from pipeline.judges.judge_budget import Budget, read_spent
from pipeline.judges.llm_reward.rubric_reward import RubricReward
from pipeline.judges.make_judge import make_chat_model, places_of_replies
from pipeline.judges.reply_cache import ReplyCache
from pipeline.launch.checkpoint_mirror import SPENT_FILE
from pipeline.settings.judge_config import JudgingConfig
from pipeline.storage.addresses import S3Address
from ppo_core.config.placement import Precision
from ppo_core.config.reward_names import NamedReward
from ppo_core.errors import ProcessError
from ppo_core.io.atomic_files import write_atomically
from ppo_core.io.text_files import read_json_file
from ppo_core.io.user_code import LoadedFunction
from ppo_core.io.validation import read_record

RUBRIC_FILE = "rubric.json"
"""Name of the file with the `RubricJob` in the folder of a training."""

PROGRAM = ("pipeline.judges.llm_reward",)
"""Words of the command that runs PPO with language models as rewards."""


@dataclass(frozen=True, kw_only=True)
class RubricJob:
    """Settings with which the processes of a training ask language models."""

    rubric: str
    """Text of the rubric."""

    judging: JudgingConfig
    """Settings of the calls. The limits of calls and tokens apply to all processes together."""

    max_invalid: float
    """Largest share of answers without a score."""

    precision: Precision
    """Precision of a language model that runs in the processes of the training."""

    replies: str
    """Folder of stored replies."""

    shared_replies: str
    """Address of the stored replies in S3; empty if all machines share the folder."""

    processes: int
    """Number of processes of the training."""

    versions: dict[str, str]
    """By name of a reward: digest of everything that decides its scores."""


def job_of_run(rewards: RunRewards, processes: int = 1) -> RubricJob:
    """Return the job of a run's language models for a number of processes."""
    settings = rewards.data.settings
    replies, shared = places_of_replies(settings)
    digests = rewards.digests()
    return RubricJob(
        rubric=rewards.rubric,
        judging=settings.judging,
        max_invalid=settings.evaluation.max_invalid,
        precision=settings.precision,
        replies=str(replies),
        shared_replies="" if shared is None else str(shared),
        processes=processes,
        versions={one.name: digests[one.name] for one in rewards.language_models},
    )


def write_rubric_job(job: RubricJob, folder: Path) -> None:
    """Write a job into the folder of a training."""
    write_atomically(folder / RUBRIC_FILE, json.dumps(asdict(job), indent=2))


class LanguageModels:
    """The language models in one process of a training; they share one budget."""

    def __init__(self, job: RubricJob, folder: Path | None = None) -> None:
        """Record calls and tokens in the folder of the training; None records nothing."""
        self.job = job
        self.folder = folder
        self.budget = _share_of_budget(job, folder / SPENT_FILE if folder else None)

    def load(self, one: NamedReward) -> LoadedFunction:
        """Return a language model as a function of prompts and responses.

        Raises:
            ConfigError: the address of the server is invalid, or the key is missing.
            ModelError: the model cannot answer questions.
        """
        return LoadedFunction(function=self.reward(one), version=self.job.versions[one.name])

    def reward(self, one: NamedReward) -> RubricReward:
        """Return a language model as a reward, see `load`."""
        job, shared = self.job, self.job.shared_replies
        return RubricReward(
            one,
            make_chat_model(one.kind, one.source, job.judging, self.budget, job.precision),
            ReplyCache(Path(job.replies), S3Address.parse(shared) if shared else None),
            job.rubric,
            attempts=job.judging.attempts,
            max_invalid=job.max_invalid,
        )


def load_job(folder: Path) -> LanguageModels:
    """Return the language models of the training in a folder, for one of its processes."""
    given = read_json_file(folder / RUBRIC_FILE, ProcessError)
    return LanguageModels(read_record(given, RubricJob), folder)


def _share_of_budget(job: RubricJob, file: Path | None) -> Budget:
    """Return the budget of one process: an equal part of what the training has not spent yet."""
    spent = read_spent(file).values() if file else ()
    used = sum(one.calls for one in spent), sum(one.tokens or 0 for one in spent)
    calls, tokens = (
        None if limit is None else each + max(0, limit - each) // job.processes
        for limit, each in zip((job.judging.max_calls, job.judging.max_tokens), used, strict=True)
    )
    note = f" (the part of one of {job.processes} processes)" if job.processes > 1 else ""
    return Budget(calls, tokens, note=note, file=file)
