"""Read the setting `rewards`: name, kind and source of each reward."""

import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from ppo_core.config.hub_ids import split_revision
from ppo_core.config.spelling import nearest_name
from ppo_core.errors import ConfigError

RewardKind: TypeAlias = Literal["reward-model", "python", "openai", "transformers"]

OWN = "reward-model"
"""Entry of `rewards` that means the run's own reward model."""

KINDS: tuple[RewardKind, ...] = get_args(RewardKind)

GRAMMAR = (
    f"A reward is {OWN} (the run's own), reward-model:PATH, python:FILE_OR_MODULE:FUNCTION, "
    "openai:MODEL or transformers:PATH, with or without NAME= before it"
)

MOST_CHARACTERS = 100
"""Maximum number of characters of a name that is derived from a source."""

_NAMED = re.compile(r"([\w.-]+)=(.*)", re.DOTALL | re.ASCII)
_NOT_IN_A_NAME = re.compile(r"[^\w.-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class NamedReward:
    """One entry of `rewards`."""

    name: str
    """Name of the reward; its metric is `rewards/NAME`."""

    spec: str
    """The entry as the user wrote it."""

    kind: RewardKind
    source: str
    """Folder or hub id of a model, name of a model on a server, or FILE_OR_MODULE:FUNCTION; empty
    for the run's own model."""

    @property
    def is_own(self) -> bool:
        """Whether the reward is the reward model of the run."""
        return not self.source

    @property
    def is_language_model(self) -> bool:
        """Whether a language model scores the responses, by a rubric."""
        return self.kind in ("openai", "transformers")

    def moved(self, source: str) -> str:
        """Return the entry with another source, and the same name."""
        return self.spec if source == self.source else f"{self.name}={self.kind}:{source}"


def read_rewards(specs: Sequence[str]) -> list[NamedReward]:
    """Return the rewards that the entries of the setting `rewards` describe.

    Raises:
        ConfigError: an entry is unknown or given twice, or two rewards have the same name.
    """
    rewards = [_parse(spec.strip()) for spec in specs]
    for number, one in enumerate(rewards):
        if any(_is_same(one, other) for other in rewards[:number]):
            raise ConfigError(
                f"rewards names {one.spec!r} twice. Name it once, and give it a larger weight in "
                "reward_weights."
            )
    names = Counter(one.name for one in rewards)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(
            f"Two entries of rewards have the name {twice[0]!r}, so their metrics would overwrite "
            "each other. Write NAME= before one of them."
        )
    return rewards


def disagreement_names(rewards: Collection[str], means: Collection[str]) -> dict[str, str]:
    """Return reward in `means` -> name of the metric for the disagreement of its models.

    Each reward in `means` is the mean of several models, and the metric is the standard deviation
    of their scores. One reward's metric is `disagreement`; several have `disagreement_REWARD`.

    Raises:
        ConfigError: one of the `rewards` has the name of such a metric.
    """
    several = len(means) > 1
    names = {mean: f"disagreement_{mean}" if several else "disagreement" for mean in means}
    for mean, name in names.items():
        if name in rewards:
            raise ConfigError(
                f"A reward has the name {name!r}. The metric for the disagreement of the models of "
                f"the reward {mean!r} has this name, so one would overwrite the other. Give "
                "the reward another name: write NAME= before its entry in rewards, or pass a dict."
            )
    return names


def _parse(spec: str) -> NamedReward:
    named = _NAMED.fullmatch(spec)
    name, rest = (named[1], named[2]) if named else ("", spec)
    kind, _, source = rest.partition(":")
    if rest == OWN:
        return NamedReward(name=name or OWN, spec=spec, kind="reward-model", source="")
    for known in KINDS:
        if kind == known and source:
            last = source.rpartition(":")[2] if kind == "python" else split_revision(source)[0]
            name = name or _short(str(last))
            return NamedReward(name=name, spec=spec, kind=known, source=source)
    near = nearest_name(kind, KINDS)
    written = f"{near}:{source}" if source else near
    hint = f" Did you mean {written}?" if near and near != kind else ""
    raise ConfigError(f"rewards: {spec!r:.80} is unknown.{hint} {GRAMMAR}.")


def _short(source: str) -> str:
    """Return the last part of a path, an address or a hub id, for a metric's name."""
    name = Path(source.partition("#")[0]).name
    return _NOT_IN_A_NAME.sub("_", name)[-MOST_CHARACTERS:] or "reward"


def _is_same(one: NamedReward, other: NamedReward) -> bool:
    return one.kind == other.kind and same_place(one.source, other.source)


def same_place(one: str, other: str) -> bool:
    """Return whether two sources are the same file, folder or hub id."""
    # A text with NUL is not a path.
    if not one or not other or "\0" in one + other:
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)
