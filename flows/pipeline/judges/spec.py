"""From a setting to a judge: one of five kinds, or several that vote."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.judges.budget import Budget
from pipeline.judges.ensemble import Ensemble
from pipeline.judges.function_judge import load_function_judge, rule_judge
from pipeline.judges.verdict import Judge
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.errors import ConfigError, PPOError
from ppo_core.models.loading import check_reward_config, load_tokenizer

KINDS_AT_A_PLACE = ("python", "reward-model", "openai", "transformers")


@dataclass(frozen=True)
class _Part:
    """One judge of a spec."""

    spec: str
    """As the user wrote it."""

    kind: str
    """One of `KINDS_AT_A_PLACE`, or `rule`."""

    place: str
    """What follows the kind: a path, a function, the name of a model; empty for the rule."""


def make_judge(spec: str, *, config: JudgingConfig, cache_folder: Path, end_of_text: bool) -> Judge:
    """The judge that `spec` names, ready to be asked.

    Args:
        spec: `rule` (the built-in task's own), `reward-model:PATH`,
            `python:FILE_OR_MODULE:FUNCTION`, `openai:MODEL` or `transformers:PATH`; several,
            joined by commas, vote.
        config: how chat models are asked.
        cache_folder: where their replies are kept.
        end_of_text: whether a reward model that judges reads an end-of-sequence token after
            each answer.

    Raises:
        ConfigError: the spec is unknown, names one judge twice, or a function that is not there.
        ModelError: the model cannot judge.
    """
    # One for all: the limits are those of an evaluation, however many judges it asks.
    budget = Budget(config.max_calls, config.max_tokens)
    judges = []
    for part in _parts_of(spec):
        with _named_in_errors(part):
            judges.append(_make_one(part, config, budget, cache_folder, end_of_text))
    return judges[0] if len(judges) == 1 else Ensemble(judges)


def check_judge(spec: str, reward_model: str, config: JudgingConfig) -> None:
    """Refuse a judge that cannot be asked later, or that is the reward model itself.

    A server is asked one small question; of models no weights are loaded.

    Args:
        spec: as for `make_judge`.
        reward_model: folder or hub id of the reward model that PPO trains against; empty if it
            is yet to be trained.
        config: how chat models are asked.

    Raises:
        ConfigError: the judge is unknown, not importable, or not independent.
        JudgeError: the server does not answer.
        ModelError: the model that judges does not give one score, cannot chat, or has no
            tokenizer.
    """
    parts = _parts_of(spec)
    for part in parts:
        _require_independence(part, reward_model)
    for part in parts:
        with _named_in_errors(part):
            _check_one(part, config)


def _parts_of(spec: str) -> list[_Part]:
    """The judges of a spec, in their order."""
    parts: list[_Part] = []
    for text in spec.split(","):
        part = _parse(text.strip())
        if any(part.kind == other.kind and _same_place(part, other.place) for other in parts):
            raise ConfigError(
                f"judge={spec!r} names {part.spec} twice, and its vote would count twice. "
                "Name each judge once."
            )
        parts.append(part)
    return parts


def _parse(spec: str) -> _Part:
    kind, _, place = spec.partition(":")
    if spec != "rule" and not (kind in KINDS_AT_A_PLACE and place):
        raise ConfigError(
            f"judge={spec!r} is unknown. A judge is rule, reward-model:PATH, "
            "python:FILE_OR_MODULE:FUNCTION, openai:MODEL or transformers:PATH; several are "
            "joined by commas."
        )
    return _Part(spec, kind, place)


def _make_one(
    part: _Part, config: JudgingConfig, budget: Budget, cache_folder: Path, end_of_text: bool
) -> Judge:
    if part.kind == "rule":
        return rule_judge()
    if part.kind == "python":
        return load_function_judge(part.place)
    if part.kind == "reward-model":
        from pipeline.judges.reward_model_judge import RewardModelJudge

        return RewardModelJudge(part.place, end_of_text=end_of_text)
    from pipeline.judges.chat_judge import ChatJudge
    from pipeline.judges.reply_cache import ReplyCache

    if part.kind == "openai":
        from pipeline.judges.openai_model import OpenAIModel

        return ChatJudge(OpenAIModel(part.place, config, budget), config, ReplyCache(cache_folder))
    from pipeline.judges.transformers_model import TransformersModel

    return ChatJudge(TransformersModel(part.place, config), config, ReplyCache(cache_folder))


def _check_one(part: _Part, config: JudgingConfig) -> None:
    if part.kind == "python":
        load_function_judge(part.place)
    elif part.kind == "reward-model":
        check_reward_config(part.place)
        load_tokenizer(part.place)
    elif part.kind == "openai":
        from pipeline.judges.openai_model import OpenAIModel

        OpenAIModel(part.place, config).probe()
    elif part.kind == "transformers":
        from pipeline.judges.transformers_model import check_chat_model

        check_chat_model(part.place)


def _require_independence(part: _Part, reward_model: str) -> None:
    is_model = part.kind in ("reward-model", "transformers")
    if is_model and reward_model and _same_place(part, reward_model):
        raise ConfigError(
            f"judge={part.spec!r} is the reward model that PPO trains against: the win rate would "
            "only measure how well it was exploited. Name another judge."
        )


def _same_place(part: _Part, place: str) -> bool:
    return Path(part.place).resolve() == Path(place).resolve()


@contextmanager
def _named_in_errors(part: _Part) -> Iterator[None]:
    """Whatever is refused inside, the message begins with the judge as the user wrote it."""
    try:
        yield
    except PPOError as error:
        raise type(error)(f"judge={part.spec!r}: {error}") from error
