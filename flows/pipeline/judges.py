"""A judge compares two answers to a prompt."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline import demo_judge
from ppo_core.errors import ConfigError, DataError
from ppo_core.loading import check_reward_config, load_reward_model
from ppo_core.reward_model import RewardModel

VERDICTS = ("first", "second", "tie", "invalid")

Judge = Callable[[Sequence[str], Sequence[tuple[str, str]]], list[str]]
"""Prompts and pairs of answers to verdicts, one of `VERDICTS` a pair."""


def make_judge(spec: str, *, end_of_text: bool) -> Judge:
    """The judge that `spec` names.

    Args:
        spec: `rule` (the built-in task's own), `reward-model:PATH` or
            `python:FILE_OR_MODULE:FUNCTION`.
        end_of_text: whether a reward model that judges reads an end-of-sequence token after
            each answer.

    Raises:
        ConfigError: the spec is unknown, or names a function that is not there.
        ModelError: the reward model cannot judge.
    """
    kind, _, rest = spec.partition(":")
    if kind == "rule" and not rest:
        return demo_judge.judge
    if kind == "reward-model" and rest:
        return _judge_by_reward_model(load_reward_model(rest, end_of_text=end_of_text))
    if kind == "python" and rest:
        return _judge_by_function(spec, _import_function(rest))
    raise ConfigError(
        f"judge={spec!r} is unknown. A judge is rule, reward-model:PATH or "
        "python:FILE_OR_MODULE:FUNCTION."
    )


def check_judge(spec: str, reward_model: str) -> None:
    """Refuse a judge that cannot be asked later, or that is the reward model itself.

    Raises:
        ConfigError: the judge is unknown, not importable, or not independent.
        ModelError: the reward model that judges does not give one score.
    """
    kind, _, rest = spec.partition(":")
    if kind == "reward-model" and rest:
        check_reward_config(rest)
    else:
        make_judge(spec, end_of_text=False)
    if kind == "reward-model" and reward_model and _same_place(rest, reward_model):
        raise ConfigError(
            f"judge={spec!r} is the reward model that PPO trains against: the win rate would only "
            "measure how well it was exploited. Name another judge."
        )


def _judge_by_reward_model(model: RewardModel) -> Judge:
    def judge(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
        first = model.score_texts(prompts, [pair[0] for pair in pairs]).tolist()
        second = model.score_texts(prompts, [pair[1] for pair in pairs]).tolist()
        return [_by_score(one, other) for one, other in zip(first, second, strict=True)]

    return judge


def _by_score(first: float, second: float) -> str:
    if first == second:
        return "tie"
    return "first" if first > second else "second"


def _judge_by_function(spec: str, function: Callable[..., Any]) -> Judge:
    def judge(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
        verdicts = list(function(list(prompts), list(pairs)))
        if len(verdicts) != len(pairs):
            raise DataError(
                f"The judge {spec} gave {len(verdicts)} verdicts for {len(pairs)} pairs."
            )
        for number, verdict in enumerate(verdicts):
            if verdict not in VERDICTS:
                raise DataError(
                    f"The judge {spec} gave {verdict!r} for pair {number}; a verdict is one of "
                    f"{', '.join(VERDICTS)}."
                )
        return verdicts

    return judge


def _import_function(place: str) -> Callable[..., Any]:
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ConfigError(
            f"judge='python:{place}' names no function. Write python:FILE_OR_MODULE:FUNCTION."
        )
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"judge='python:{place}': {where} has no function '{name}'.")
    return function  # type: ignore[no-any-return]


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"judge='python:{path}:...': there is no file {path.absolute()}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"judge='python:{path}:...' cannot be imported: {error}.") from error
    return module


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"judge='python:{name}:...' cannot be imported: {error}.") from error


def _same_place(one: str, other: str) -> bool:
    return one == other or Path(one).resolve() == Path(other).resolve()
