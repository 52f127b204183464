"""Make the judge that the setting `judge` names: a judge of one of five kinds, or an ensemble."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.judges.ensemble import Ensemble
from pipeline.judges.function_judge import load_function_judge, rule_judge
from pipeline.judges.judge_budget import Budget
from pipeline.judges.judge_names import (
    JudgePart,
    check_judge_name,
    has_access_to_judge,
    read_judges,
)
from pipeline.judges.reply_cache import ReplyCache
from pipeline.judges.verdict import Judge
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.settings import Settings
from pipeline.storage.addresses import S3Address
from pipeline.storage.workspace import workspace_of
from ppo_core.config.placement import Precision
from ppo_core.errors import PPOError
from ppo_core.models.loading import check_reward_config, load_tokenizer


def make_judge(
    spec: str,
    *,
    config: JudgingConfig,
    cache_folder: Path,
    shared_cache: S3Address | None = None,
    end_of_text: bool,
    precision: Precision = "auto",
    budget: Budget | None = None,
) -> Judge:
    """Return the judge that `spec` names.

    Args:
        spec: `rule` (the judge of the built-in task), `reward-model:PATH`,
            `python:FILE_OR_MODULE:FUNCTION`, `openai:MODEL` or `transformers:PATH`. Several
            judges, separated by commas, form an ensemble.
        config: settings of chat models that judge.
        cache_folder: folder for the replies of chat models.
        shared_cache: address of these replies in S3; None if all machines share the folder.
        end_of_text: whether a reward model reads an end-of-sequence token after each answer.
        precision: precision of a chat model on this machine.
        budget: counter of the calls of servers. If None, a new one has the limits of `config`.

    Raises:
        ConfigError: `spec` is unknown, names a judge twice, or names a missing function.
        ModelError: the model cannot judge.
    """
    # The judges share one budget, because the limits are per evaluation.
    budget = budget or Budget.of(config)
    judges = []
    replies = ReplyCache(cache_folder, shared_cache)
    for part in read_judges(spec):
        with _named_in_errors(part):
            judges.append(_make_one(part, config, budget, replies, end_of_text, precision))
    return judges[0] if len(judges) == 1 else Ensemble(judges)


def make_judge_of_run(settings: Settings, spec: str, budget: Budget | None = None) -> Judge:
    """Return a judge whose replies are stored for all runs of the same workspace.

    Raises:
        ConfigError: see `make_judge`.
        ModelError: see `make_judge`.
    """
    workspace = workspace_of(settings)
    replies = workspace.cache / "replies"
    return make_judge(
        spec,
        config=settings.judging,
        cache_folder=replies,
        shared_cache=workspace.address(replies) if workspace.store else None,
        end_of_text=settings.reward_model_training.end_of_text,
        precision=settings.precision,
        budget=budget,
    )


def check_judge(spec: str, reward_model: str, config: JudgingConfig) -> None:
    """Check early that a judge will work, and that it is not PPO's reward model.

    The check asks a server one small question, and loads no weights.

    Args:
        spec: specification as for `make_judge`.
        reward_model: folder or hub id of the reward model of PPO; empty if the flow trains it.
        config: settings of chat models that judge.

    Raises:
        ConfigError: the judge is unknown, cannot be imported, or is the reward model.
        JudgeError: the server does not answer.
        ModelError: a reward model gives no single score, a chat model has no chat template, or a
            model has no tokenizer.
    """
    check_judge_name(spec, reward_model, config.base_url)
    for part in read_judges(spec):
        with _named_in_errors(part):
            _check_one(part, config)


def _make_one(
    part: JudgePart,
    config: JudgingConfig,
    budget: Budget,
    replies: ReplyCache,
    end_of_text: bool,
    precision: Precision,
) -> Judge:
    if part.kind == "rule":
        return rule_judge()
    if part.kind == "python":
        return load_function_judge(part.source)
    if part.kind == "reward-model":
        from pipeline.judges.reward_model_judge import RewardModelJudge

        return RewardModelJudge(part.source, end_of_text=end_of_text)
    from pipeline.judges.chat_judge import ChatJudge

    if part.kind == "openai":
        from pipeline.judges.openai_model import OpenAIModel

        return ChatJudge(OpenAIModel(part.source, config, budget), config, replies)
    from pipeline.judges.transformers_model import TransformersModel

    model = TransformersModel(part.source, config, precision)
    return ChatJudge(model, config, replies)


def _check_one(part: JudgePart, config: JudgingConfig) -> None:
    if part.kind == "python":
        load_function_judge(part.source)
    elif part.kind == "reward-model":
        check_reward_config(part.source)
        load_tokenizer(part.source)
    elif part.kind == "openai" and has_access_to_judge():
        from pipeline.judges.openai_model import OpenAIModel

        OpenAIModel(part.source, config).probe()
    elif part.kind == "transformers":
        from pipeline.judges.transformers_model import check_chat_model

        check_chat_model(part.source)


@contextmanager
def _named_in_errors(part: JudgePart) -> Iterator[None]:
    """Prefix the message of an error with the user's specification of the judge."""
    try:
        yield
    except PPOError as error:
        raise type(error)(f"judge={part.spec!r}: {error}") from error
