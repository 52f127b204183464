"""Read the setting `judge`: the kind and the source of each judge that it names.

This file imports no large library, so that a misspelt judge is reported at once.
"""

import os
from dataclasses import dataclass

from ppo_core.config.hub_ids import split_revision
from ppo_core.config.spelling import nearest_name
from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package

KINDS_WITH_SOURCE = ("python", "reward-model", "openai", "transformers")


@dataclass(frozen=True)
class JudgePart:
    """One judge of a specification."""

    spec: str
    """Specification of this judge as the user wrote it."""

    kind: str
    """One of `KINDS_WITH_SOURCE`, or `rule`."""

    source: str
    """Text after `kind:`, which is a path, a function or a model's name; empty for `rule`."""


def read_judges(spec: str) -> list[JudgePart]:
    """Return the judges that a specification names.

    Raises:
        ConfigError: a judge is unknown, or named twice.
    """
    parts: list[JudgePart] = []
    for text in spec.split(","):
        part = _parse(text.strip())
        if any(part.kind == other.kind and _same_source(part, other.source) for other in parts):
            raise ConfigError(
                f"judge={spec!r} names {part.spec} twice, so its vote would count twice. "
                "Name each judge once."
            )
        parts.append(part)
    return parts


def _parse(spec: str) -> JudgePart:
    kind, _, source = spec.partition(":")
    if spec != "rule" and not (kind in KINDS_WITH_SOURCE and source):
        near = nearest_name(kind, KINDS_WITH_SOURCE) if source else None
        hint = f" Did you mean {near}:{source}?" if near and near != kind else ""
        raise ConfigError(
            f"judge={spec!r} is unknown.{hint} A judge is rule, reward-model:PATH, "
            "python:FILE_OR_MODULE:FUNCTION, openai:MODEL or transformers:PATH; several are "
            "joined by commas."
        )
    return JudgePart(spec, kind, source)


def check_judge_name(spec: str, reward_model: str) -> None:
    """Raise if a specification is misspelt, or names PPO's reward model; nothing is read or asked.

    Args:
        spec: specification as for `make_judge`.
        reward_model: folder or hub id of the reward model of PPO; empty if the flow trains it.

    Raises:
        ConfigError: the judge is unknown, named twice, or the reward model, or its package is
            missing.
    """
    for part in read_judges(spec):
        _require_independence(part, reward_model)
        if part.kind == "openai":
            require_package("openai", extra="judge", needed_by=f"judge={part.spec!r}")


def _require_independence(part: JudgePart, reward_model: str) -> None:
    is_model = part.kind in ("reward-model", "transformers")
    # Another revision of the reward model was mostly trained on the same preferences.
    if is_model and reward_model and _repository(part.source) == _repository(reward_model):
        raise ConfigError(
            f"judge={part.spec!r} is the reward model that PPO trains against. The win rate would "
            "only measure how well PPO exploits this model. Name another judge."
        )


def _same_source(part: JudgePart, source: str) -> bool:
    return os.path.realpath(part.source) == os.path.realpath(source)


def _repository(model: str) -> str:
    return os.path.realpath(split_revision(model)[0])
