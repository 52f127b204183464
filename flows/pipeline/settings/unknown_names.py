"""Make error messages for unknown settings: they suggest a setting, and say how to write it."""

from collections.abc import Collection, Mapping

from ppo_core.config.spelling import nearest_name, same_setting
from ppo_core.config.trl_names import SUPERVISED_INSTEAD
from ppo_core.config.unsupported_settings import INSTEAD, Unsupported

_REFUSED: dict[str, Unsupported] = {
    "ppo.": INSTEAD,
    "sft.": SUPERVISED_INSTEAD,
    "reward_model_training.": SUPERVISED_INSTEAD,
}
"""Section -> names from TRL and transformers that the section refuses, with advice."""

FILE_FORM = "python flows/rlhf.py --config settings FILE run"

ONLY_IN_FILE = (
    "Metaflow reads num_nodes before it reads flags, because num_nodes decides the steps of the "
    "run. Write `num_nodes = 2` at the top of the settings file, and start with: "
    f"{FILE_FORM}"
)
"""Advice to a user who sets num_nodes on the command line."""


def describe_unknown_setting(name: str, where: str, known: Mapping[str, Collection[str]]) -> str:
    """Return a message about a setting that does not exist.

    Args:
        name: the name in its section.
        where: the section with a dot, such as `ppo.`; empty for the top level.
        known: section with a dot -> names of its settings.
    """
    unknown = f"Unknown setting {where}{name:.80}."
    if same := same_setting(name, known[where]):
        return f"{unknown} Did you mean {where}{same}?"
    if name in _REFUSED.get(where, {}):
        return f"{unknown} Instead: {_REFUSED[where][name][1]}."
    if places := settings_named(name, known):
        return f"{unknown} Did you mean {' or '.join(places)}?"
    if near := nearest_name(name, known[where]):
        return f"{unknown} Did you mean {where}{near}?"
    return f"{unknown} Known here: {', '.join(known[where])}."


def settings_named(name: str, known: Mapping[str, Collection[str]]) -> list[str]:
    """Return the full names of all settings that a name without a section may mean."""
    found = {section: same_setting(name, names) for section, names in known.items()}
    return [f"{section}{same}" for section, same in found.items() if same]


def describe_unknown_option(
    option: str, options: Collection[str], known: Mapping[str, Collection[str]]
) -> str:
    """Return advice on an option that Metaflow does not know: what to write instead.

    Args:
        option: the option as it was given, such as `--lr`.
        options: the options of `run` for the flow's parameters, without leading hyphens.
        known: section with a dot -> names of its settings.
    """
    name = option.lstrip("-").replace("-", "_")
    flags = {each.replace("-", "_"): f"--{each}" for each in options}
    if name in ("config", "settings", "config_file", "settings_file"):
        return f"The settings file is named before `run`: {FILE_FORM}"
    if name == "num_nodes":
        return ONLY_IN_FILE
    if name in flags:
        return f"Write {flags[name]} after `run`: python flows/rlhf.py run {flags[name]} ..."
    if same := same_setting(name, flags):
        return f"Did you mean {flags[same]}?"
    if places := settings_named(name, known):
        return f"Did you mean {' or '.join(f'--set {place}=VALUE' for place in places)}?"
    if near := nearest_name(name, flags):
        return f"Did you mean {flags[near]}?"
    nearest = {section: nearest_name(name, names) for section, names in known.items()}
    if places := [f"--set {section}{near}=VALUE" for section, near in nearest.items() if near]:
        return f"Did you mean {' or '.join(places)}?"
    return "Settings without an option are given as --set SECTION.NAME=VALUE."
