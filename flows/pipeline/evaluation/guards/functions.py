"""Use functions of a user as guards."""

from collections.abc import Callable, Sequence

import numpy as np

from pipeline.evaluation.pair_accuracy import Array
from pipeline.settings.gate_configs import GuardsConfig
from ppo_core.errors import ConfigError, DataError, user_code_errors
from ppo_core.io.progress_bar import BAR_DELAY, progress
from ppo_core.io.user_code import LoadedFunction, load_function, require_call

NUMBERS = "biuf"
"""Kind codes of the number types of NumPy, including bool."""

TAKES = "prompts and responses, and returns a number in [0, 1] for each response"


def load_guards(config: GuardsConfig) -> dict[str, LoadedFunction]:
    """Return the guard functions of the user, by name of the guard.

    Raises:
        ConfigError: a function does not exist, cannot be imported, or does not take two lists.
    """
    return {name: _load(name, source) for name, source in config.functions.items()}


def _load(name: str, source: str) -> LoadedFunction:
    setting = f"promotion.guards.functions.{name}={source!r}"
    call = "the function is called with two lists, the prompts and the responses"
    try:
        loaded = load_function(source.removeprefix("python:"), TAKES)
        require_call(loaded.function, call, f"{name}(prompts, responses)")
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    return loaded


def score_by_function(
    name: str, function: Callable[..., object], prompts: Sequence[str], responses: Sequence[str]
) -> Array:
    """Return the scores (N,) that a function gives to responses.

    Raises:
        DataError: the function raises an error, or does not return one number in [0, 1] for each
            response.
    """
    # The stall watch notices a hang only while a progress bar is open; a hidden bar is enough.
    with progress(1, "guarding", "call", delay=BAR_DELAY) as bar:
        with user_code_errors(DataError, f"The guard {name}"):
            given = function(list(prompts), list(responses))
        bar.update()
    try:
        scores = np.asarray(given)
    # ValueError: the result contains lists of different lengths. RuntimeError and TypeError: the
    # result is a tensor that NumPy cannot read: it needs gradients, is in bfloat16, or on a GPU.
    except (ValueError, RuntimeError, TypeError):
        scores = np.empty(0, dtype=object)
    if scores.dtype.kind not in NUMBERS or scores.shape != (len(responses),):
        raise DataError(
            f"The guard {name} returned {given!r:.80} for {len(responses)} responses. Return a "
            "list with one number in [0, 1] for each response."
        )
    if wrong := [score for score in scores.tolist() if not 0 <= score <= 1]:
        raise DataError(
            f"The guard {name} returned {wrong[0]}, but the score of a response must be in [0, 1]. "
            "Return 1 for a response that is as it should be, and 0 for one that is not."
        )
    return scores.astype(float)
