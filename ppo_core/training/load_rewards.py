"""Load the rewards that the setting `rewards` names."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from ppo_core.checkpointing.fingerprint import Layout
from ppo_core.config.reward_names import NamedReward
from ppo_core.data.reward_columns import AskedColumns, asked_columns
from ppo_core.errors import ConfigError, PPOError
from ppo_core.io.user_code import LoadedFunction, load_function, require_call

LoadLanguageModel: TypeAlias = Callable[[NamedReward], LoadedFunction]
"""Function that turns a named language model into a reward function of prompts and responses."""


def load_functions(
    rewards: Sequence[NamedReward], load_language_model: LoadLanguageModel | None = None
) -> dict[str, LoadedFunction]:
    """Load the rewards that are functions or language models; return reward name -> function.

    Raises:
        ConfigError: a function does not exist, cannot be imported, or takes other arguments; or a
            reward is a language model, and `load_language_model` is None.
    """
    functions = {}
    for one in rewards:
        if one.is_language_model:
            with named_in_errors(one):
                if load_language_model is None:
                    raise ConfigError(
                        "language models as rewards work only in the flow: run `python "
                        "flows/rlhf.py`. Or call the model in a function, "
                        "python:FILE_OR_MODULE:FUNCTION."
                    )
                functions[one.name] = load_language_model(one)
        elif one.kind == "python":
            with named_in_errors(one):
                loaded = load_function(one.source, "prompts and responses")
                _require_two_arguments(loaded.function, asked_columns(one.name, loaded.function))
            functions[one.name] = loaded
    return functions


def reward_prints(
    rewards: Sequence[NamedReward], functions: dict[str, LoadedFunction]
) -> dict[str, Layout]:
    """Return the fingerprint of each reward; a run can only resume with equal ones (`Fingerprint`).

    A fingerprint contains the reward's index, because the index determines the weight in
    `reward_weights`. `given_models` returns fingerprints of the models' weights.
    """
    prints = {}
    for number, one in enumerate(rewards):
        prints[f"reward {number}"] = {"name": one.name, "kind": one.kind}
        if one.kind == "python":
            prints[f"reward {number}"]["function"] = one.source.rpartition(":")[2]
        if one.name in functions:
            prints[f"reward {number}"]["file"] = functions[one.name].version
    return prints


@contextmanager
def named_in_errors(reward: NamedReward) -> Iterator[None]:
    """Prefix the message of an error with the entry of `rewards`."""
    try:
        yield
    except PPOError as error:
        raise type(error)(f"rewards={reward.spec!r}: {error}") from error


def _require_two_arguments(function: Callable[..., Any], asked: AskedColumns) -> None:
    require_call(
        function,
        "the function is called with two lists, the prompts and the responses, and with columns by "
        "keyword",
        "reward(prompts, responses), or as reward(prompts, responses, COLUMN)",
        **{name: [] for name in asked.required},
    )
