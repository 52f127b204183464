"""The form of a checkpoint's JSON files, without which a run cannot resume from it.

Keys that a version of the library has added later are not required. Metrics may be NaN, because a
batch with a score that is not finite is skipped; numbers that training uses must be finite.
"""

import re
from typing import Any

from ppo_core.checkpointing.files import STATE
from ppo_core.io.json_form import (
    is_count,
    is_finite_json,
    is_finite_number,
    is_number,
    is_object,
    is_text,
    object_of,
    optional,
)


def is_list_of_texts(value: Any) -> bool:
    """Return whether a value is a list of strings."""
    return isinstance(value, list) and all(map(is_text, value))


def is_number_or_null(value: Any) -> bool:
    """Return whether a value is a number or null."""
    return value is None or is_number(value)


def is_scheduler_state(value: Any) -> bool:
    """Return whether a value has a schedule's number of steps, and only finite numbers."""
    return (
        isinstance(value, dict)
        and is_count(value.get("last_epoch"))
        and all(map(is_finite_number, value.get("base_lrs", [])))
        and is_finite_json(value)
    )


def is_health_state(value: Any) -> bool:
    """Return whether a value has the types of a HealthMonitor's state, also of an early version."""
    match value:
        case {"in_a_row": dict(in_a_row), "first": dict(first), "warned": warned}:
            is_valid = is_list_of_texts(warned) and all(map(is_number, first.values()))
            return (
                is_valid
                and all(map(is_count, in_a_row.values()))
                and ("drop" not in value or is_reward_drop(value["drop"]))
            )
        case {"in_a_row": dict(in_a_row), "first_length": length}:
            return is_number_or_null(length) and all(map(is_count, in_a_row.values()))
    return False


def is_reward_drop(value: Any) -> bool:
    """Return whether a value has the types of a RewardDrop's state, with finite numbers."""
    match value:
        case {"recent": [*recent], "best": best, "changes": changes, "updates": updates}:
            return (
                all(map(is_finite_number, recent))
                and (best is None or is_finite_number(best))
                and is_finite_number(changes)
                and is_count(updates)
            )
    return False


def is_log_entry(value: Any) -> bool:
    """Return whether a value has the types of an entry of the log history."""
    return (
        isinstance(value, dict)
        and is_count(value.get("step"))
        and all(map(is_number_or_null, value.values()))
    )


def is_parameter_group(value: Any) -> bool:
    """Return whether a value has an optimizer's options with finite numbers."""
    return isinstance(value, dict) and is_finite_number(value.get("lr")) and is_finite_json(value)


def is_python_random_state(value: Any) -> bool:
    """Return whether a value has the types of the state of Python's random generator."""
    match value:
        case [int(), [*words], None | float()]:
            return all(map(is_count, words))
    return False


def is_numpy_random_state(value: Any) -> bool:
    """Return whether a value has the types of the state of NumPy's random generator."""
    match value:
        case [str(), int(), int(), int() | float()]:
            return True
    return False


_PENDING_FORM = {
    "values": object_of(is_number_or_null),
    "metrics": object_of(is_number),
    "steps_done": is_count,
    "sums": object_of(is_number),
}

_TRAINING_FORM = {
    "step": is_count,
    "processes": is_count,
    "identity": {"settings": is_object, "models": object_of(object_of(is_text))},
    "optimizer": {"kind": is_text, "groups": [is_parameter_group]},
    "kept": object_of(is_list_of_texts),
    "scheduler": is_scheduler_state,
}
"""Entries of trainer_state.json that every training has."""

_PPO_FORM = {
    **_TRAINING_FORM,
    "skipped_steps": is_count,
    "skipped_in_a_row": is_count,
    "pretraining": optional({"texts": is_count, "position": is_count, "generator": [is_count]}),
    "groups": [is_text],
    "run": {
        "updates": is_count,
        "episodes": is_count,
        "moments": dict.fromkeys(("count", "mean", "squares"), is_finite_number),
        "adaptive_kl": optional({"kl_coef": is_finite_number}),
        "health": is_health_state,
        "pending": optional(_PENDING_FORM),
    },
    "reporter": {
        "global_step": is_count,
        "epoch": optional(is_finite_number),
        "best_metric": is_number_or_null,
        "best_global_step": optional(is_count),
        "log_history": [is_log_entry],
        "stateful_callbacks": is_object,
    },
}

_SUPERVISED_FORM = {
    **_TRAINING_FORM,
    "progress": {"steps": is_count, "tail": is_number, "line": [is_number]},
}

_PROCESS_FORM = {"python": is_python_random_state, "numpy": is_numpy_random_state}

_PROCESSES = {r"process-\d+\.json": _PROCESS_FORM}

FORMS = {
    re.escape(STATE): _PPO_FORM,
    **_PROCESSES,
    r"(adapter_|generation_)?config\.json": is_object,
}
"""Forms of the JSON files of a PPO checkpoint."""

SUPERVISED_FORMS = {re.escape(STATE): _SUPERVISED_FORM, **_PROCESSES}
"""Forms of the JSON files of a checkpoint of supervised training."""
