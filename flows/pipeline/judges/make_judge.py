"""Create the judge that the setting `judge` names: one of five kinds, or an ensemble."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from pipeline.inputs.model_digests import digest_of_model
from pipeline.judges.chat_model import ChatModel
from pipeline.judges.function_judge import load_function_judge, rule_judge
from pipeline.judges.judge_budget import Budget
from pipeline.judges.judge_names import (
    JudgePart,
    check_judge_name,
    has_access_to_judge,
    read_judges,
)
from pipeline.judges.reply_cache import ReplyCache
from pipeline.judges.verdict import Judge, JudgedPrompt, Verdict
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.settings import Settings
from pipeline.storage.addresses import S3Address
from pipeline.storage.workspace import original_names, workspace_of
from ppo_core.config.placement import Precision
from ppo_core.errors import PPOError
from ppo_core.io.folder_cache import digest_of
from ppo_core.models.loading import check_reward_config, load_tokenizer


class Ensemble:
    """Asks every judge about every pair; the majority decides."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        """Take the judges; `Verdict.votes` has the same order as `judges`."""
        self.members = tuple(judge.name for judge in judges)
        self.name = f"majority of {'; '.join(self.members)}"
        self.version = digest_of([(judge.name, judge.version) for judge in judges])
        self._judges = tuple(judges)

    def __call__(
        self, prompts: Sequence[JudgedPrompt], pairs: Sequence[tuple[str, str]]
    ) -> list[Verdict]:
        """Return one verdict per pair, with the verdicts of the members as `votes`."""
        ballots = [judge(prompts, pairs) for judge in self._judges]
        return [count_votes(votes) for votes in zip(*ballots, strict=True)]


def count_votes(votes: Sequence[Verdict]) -> Verdict:
    """Return the verdict of the majority.

    The verdict is `invalid` if more than half of all votes are invalid. Otherwise, an answer with
    more than half of the valid votes wins. If neither answer has more than half, the verdict is a
    tie. The probability is the mean over the valid votes that have a probability; None if no valid
    vote has a probability.
    """
    valid = [vote for vote in votes if vote.winner != "invalid"]
    if len(valid) < len(votes) / 2:
        reason = f"{len(votes) - len(valid)} of {len(votes)} judges gave no verdict."
        return Verdict("invalid", reason=reason, votes=tuple(votes))
    winner, count = Counter(vote.winner for vote in valid).most_common(1)[0]
    probabilities = [vote.probability for vote in valid if vote.probability is not None]
    return Verdict(
        winner=winner if count > len(valid) / 2 else "tie",
        probability=fmean(probabilities) if probabilities else None,
        votes=tuple(votes),
    )


def make_judge(
    spec: str,
    *,
    config: JudgingConfig,
    cache_folder: Path,
    shared_cache: S3Address | None = None,
    end_of_text: bool,
    precision: Precision = "auto",
    budget: Budget | None = None,
    setting: str = "judge",
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
        budget: counter of the calls to servers; None for a new budget with the limits of `config`.
        setting: name of the setting that has `spec`, for errors.

    Raises:
        ConfigError: `spec` is unknown, names a judge twice, or names a missing function.
        ModelError: the model cannot judge.
    """
    # The judges share one budget, because the limits are per evaluation.
    budget = budget or Budget.of(config)
    judges = []
    replies = ReplyCache(cache_folder, shared_cache)
    for part in read_judges(spec):
        with _named_in_errors(part, setting):
            judges.append(_make_one(part, config, budget, replies, end_of_text, precision))
    return judges[0] if len(judges) == 1 else Ensemble(judges)


def make_judge_of_run(
    settings: Settings, spec: str, budget: Budget | None = None, *, setting: str = "judge"
) -> Judge:
    """Return a judge whose replies are stored for all runs of the same workspace.

    Raises:
        ConfigError: see `make_judge`.
        ModelError: see `make_judge`.
    """
    folder, shared = places_of_replies(settings)
    return make_judge(
        spec,
        config=settings.judging,
        cache_folder=folder,
        shared_cache=shared,
        end_of_text=settings.reward_model_training.end_of_text,
        precision=settings.precision,
        budget=budget,
        setting=setting,
    )


def digest_of_judge(settings: Settings, spec: str) -> str:
    """Return a digest of what decides a judge's verdicts; the weights of a model are not loaded.

    Raises:
        ConfigError: see `make_judge`.
        ModelError: a model does not exist.
    """
    parts = []
    for part in read_judges(spec):
        if part.kind in ("reward-model", "transformers"):
            parts.append([original_names(part.spec), digest_of_model(part.source)])
        else:
            judge = make_judge_of_run(settings, part.spec)
            parts.append([judge.name, judge.version])
    asked = settings.judging
    return digest_of(
        [
            parts,
            [asked.criterion, asked.sampling, asked.max_reply_tokens, asked.attempts],
            settings.precision,
            settings.reward_model_training.end_of_text,
        ]
    )


def digest_of_own_files(spec: str) -> str:
    """Return a digest of a judge's function or local model; empty if it has neither.

    Of several judges, all functions and local models count.

    Raises:
        ConfigError: a function does not exist.
        ModelError: a model does not exist.
    """
    found = []
    for part in read_judges(spec):
        if part.kind == "python":
            found.append(load_function_judge(part.source).version)
        elif part.kind in ("reward-model", "transformers"):
            found.append(digest_of_model(part.source))
    return digest_of(found) if found else ""


def places_of_replies(settings: Settings) -> tuple[Path, S3Address | None]:
    """Return the folder of stored replies, and their address in S3 if the workspace has a store."""
    workspace = workspace_of(settings)
    folder = workspace.cache / "replies"
    return folder, workspace.address(folder) if workspace.store else None


def make_chat_model(
    kind: str, source: str, config: JudgingConfig, budget: Budget, precision: Precision
) -> ChatModel:
    """Return the model of `openai:MODEL` or `transformers:PATH`.

    Raises:
        ConfigError: the address of the server is invalid, or the key is missing.
        ModelError: the model cannot answer questions.
    """
    if kind == "openai":
        from pipeline.judges.openai_model import OpenAIModel

        return OpenAIModel(source, config, budget)
    from pipeline.judges.transformers_model import TransformersModel

    return TransformersModel(source, config, precision)


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
        with _named_in_errors(part, "judge"):
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

    model = make_chat_model(part.kind, part.source, config, budget, precision)
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
def _named_in_errors(part: JudgePart, setting: str) -> Iterator[None]:
    """Prefix the message of an error with the setting and the user's specification of a judge."""
    try:
        yield
    except PPOError as error:
        raise type(error)(f"{setting}={part.spec!r}: {error}") from error
