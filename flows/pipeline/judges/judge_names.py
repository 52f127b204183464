"""Read the setting `judge`: the kind and the source of each judge that it names.

This file imports no large library, so that a misspelled judge is reported at once.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppo_core.config.field_checks import check_key
from ppo_core.config.hub_ids import split_revision
from ppo_core.config.reward_names import NamedReward, read_rewards, same_place
from ppo_core.config.spelling import nearest_name
from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package

OPENAI_URL = "https://api.openai.com/v1"

JUDGED_ELSEWHERE = "RLHF_JUDGED_ELSEWHERE"
"""Environment variable that marks a deployed step without the key of the judge's server. Only the
judging step reads the key. The deploy command has checked that the judging step gets a secret."""

SCORED_ELSEWHERE = "RLHF_SCORED_ELSEWHERE"
"""Environment variable that marks a deployed step without the key of a language model that is a
reward. Only the step `train_policy` reads this key."""

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


@dataclass(frozen=True)
class ServerAccess:
    """Address and key of an OpenAI-compatible server."""

    url: str
    """Address of the API."""

    key: str = field(repr=False)
    """Key of the API; empty if there is none."""

    is_openai: bool
    """Whether the server is OpenAI's own."""


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


def calls_per_question(spec: str) -> int:
    """Return the number of calls to servers for one question to all judges of a specification.

    A question that must be asked again needs more calls.
    """
    return sum(part.kind == "openai" for part in read_judges(spec))


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


def check_judge_name(spec: str, reward_model: str, base_url: str) -> None:
    """Raise if a judge is misspelled or is PPO's reward model; no model is read or asked.

    Args:
        spec: specification as for `make_judge`.
        reward_model: folder or hub id of the reward model of PPO; empty if the flow trains it.
        base_url: address of a server, see `read_access`.

    Raises:
        ConfigError: a judge is unknown, is named twice or is the reward model, or its package is
            missing; or see `read_access`.
    """
    for part in read_judges(spec):
        _require_independence(part, reward_model)
        if part.kind == "openai":
            _check_server(f"judge={part.spec!r}", base_url, needs_key=has_access_to_judge())


def check_labeller_name(spec: str, judge: str, base_url: str) -> None:
    """Raise if a labeler of the policy's samples is misspelled, or is also a judge of the run.

    Raises:
        ConfigError: see `check_judge_name`; or a labeler is also a judge of the run.
    """
    try:
        check_judge_name(spec, "", base_url)
    except ConfigError as error:
        raise ConfigError(f"fresh_pairs.labeller: {error}") from error
    judges = read_judges(judge) if judge else []
    for part in read_judges(spec):
        if any(part.kind == other.kind and _same_source(part, other.source) for other in judges):
            raise ConfigError(
                f"fresh_pairs.labeller={part.spec!r} is also a judge of the run, judge={judge!r}. "
                "The win rate would only measure how well PPO pleases this judge. Name another "
                "labeller, or another judge."
            )


def _check_server(named: str, base_url: str, *, needs_key: bool) -> None:
    require_package("openai", extra="judge", needed_by=named)
    try:
        read_access(base_url, needs_key=needs_key)
    except ConfigError as error:
        raise ConfigError(f"{named}: {error}") from error


def check_reward_names(rewards: Sequence[str], judge: str, base_url: str) -> None:
    """Raise if a reward of PPO is also a judge of the run, or if a reward's server cannot be asked.

    The judge may be one member of an ensemble.

    Raises:
        ConfigError: a reward is also a judge of the run, or the package for a reward is missing;
            or see `read_access`.
    """
    for one in read_rewards(rewards):
        if one.kind == "openai":
            _check_server(f"rewards={one.spec!r}", base_url, needs_key=has_access_to_rewards())
    for part in read_judges(judge) if judge else []:
        for one in read_rewards(rewards):
            if _is_judge(one, part):
                raise ConfigError(
                    f"rewards names {one.spec!r}, which is also a judge of the run, "
                    f"judge={judge!r}. The win rate would only measure how well PPO pleases this "
                    "judge. Name another judge, or another reward."
                )


def _is_judge(reward: NamedReward, judge: JudgePart) -> bool:
    if reward.kind in ("python", "openai") or not reward.source:
        return reward.kind == judge.kind and same_place(reward.source, judge.source)
    # Other revisions of the judge's model count too: they share most training preferences.
    is_model = judge.kind in ("reward-model", "transformers")
    return is_model and _repository(reward.source) == _repository(judge.source)


def read_access(base_url: str, *, needs_key: bool | None = None) -> ServerAccess:
    """Return the address and the key of the server that openai:MODEL asks; make no call.

    The address is the first of these that is not empty: `base_url`, the environment variable
    OPENAI_BASE_URL, and OpenAI's address. The key is the environment variable OPENAI_API_KEY. A key
    is required only for OpenAI's server, and only if `needs_key` is true. By default, `needs_key`
    is true in a step that may ask the judge.

    Raises:
        ConfigError: the address is invalid, or the key is missing or cannot be sent.
    """
    url = base_url or os.environ.get("OPENAI_BASE_URL", "") or OPENAI_URL
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    is_openai = _host(url) == _host(OPENAI_URL)
    needs_key = has_access_to_judge() if needs_key is None else needs_key
    _check_key(key, needed=is_openai and needs_key)
    return ServerAccess(url, key, is_openai)


def has_access_to_judge() -> bool:
    """Return whether this step may ask the judge."""
    return not os.environ.get(JUDGED_ELSEWHERE)


def can_ask(spec: str) -> bool:
    """Return whether this step can ask a judge: the step has the key, or no key is needed."""
    return has_access_to_judge() or not calls_per_question(spec)


def has_access_to_rewards() -> bool:
    """Return whether this step may ask a language model that is a reward."""
    return not os.environ.get(SCORED_ELSEWHERE)


def _require_independence(part: JudgePart, reward_model: str) -> None:
    is_model = part.kind in ("reward-model", "transformers")
    # Other revisions of the reward model are refused too: they share most training pairs.
    if is_model and reward_model and _repository(part.source) == _repository(reward_model):
        raise ConfigError(
            f"judge={part.spec!r} is the reward model that PPO trains against. The win rate would "
            "only measure how well PPO exploits this model. Name another judge."
        )


def _same_source(part: JudgePart, source: str) -> bool:
    return same_place(part.source, source)


def _repository(model: str) -> str:
    return os.path.realpath(split_revision(model)[0])


def _host(url: str) -> str | None:
    # Imported here, because only the check of a server's address needs it.
    from pydantic import HttpUrl, ValidationError

    try:
        address = HttpUrl(url)
    except ValidationError as error:
        raise ConfigError(
            f"judging.base_url={url!r} (or OPENAI_BASE_URL, if the setting is empty) is not a "
            "valid address. Write it as http://HOST:PORT/v1."
        ) from error
    if address.username or address.password or address.query:
        raise ConfigError(
            f"The address of the judge at {address.host} contains a user name, a password or a "
            "query, which error messages would show. Set the key as OPENAI_API_KEY instead."
        )
    return address.host


def _check_key(key: str, *, needed: bool) -> None:
    if needed and not key:
        raise ConfigError(
            f"{OPENAI_URL} requires a key. Set the environment variable "
            "OPENAI_API_KEY, or set judging.base_url to a server that needs no key."
        )
    check_key("OPENAI_API_KEY")
