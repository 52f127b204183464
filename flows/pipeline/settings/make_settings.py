"""Make the settings of a run from a TOML file and the command line, and write them as a file."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import tomli_w

from pipeline.settings.overrides import merge_tables, read_overrides
from pipeline.settings.section_defaults import (
    UNKNOWN_SIZE,
    kl_warning,
    section_defaults,
    with_section_defaults,
)
from pipeline.settings.settings import INPUTS, Settings
from pipeline.settings.unknown_names import describe_unknown_setting
from ppo_core.config.field_checks import check_type, refuse_secrets
from ppo_core.config.spelling import OLD_NAMES
from ppo_core.errors import ConfigError

NO_VALUE = "none"
"""Text that means None for a setting that may be None, because TOML has no null value."""

PRESETS = Path(__file__).parents[2] / "presets"

COMMENT = """\
# The complete settings of a run of the flow, including defaults. To repeat the run:
#
#     python flows/rlhf.py --config settings FILE run
#
# FILE is this file. Flags override this file; a section without a seed uses --seed. Paths are
# unchanged, so start the run in a folder in which the relative paths are valid. A setting
# that is missing here is None, except the seed of a section.

"""


def names_by_section(kind: Any, section: str = "") -> dict[str, list[str]]:
    """Return section, ending in a dot -> names of its settings, also for nested dataclasses."""
    types = get_type_hints(kind)
    names = {section: [one.name for one in fields(kind)]}
    for name in names[section]:
        if is_dataclass(types[name]):
            names |= names_by_section(types[name], f"{section}{name}.")
    return names


SETTING_NAMES = names_by_section(Settings)
"""Section, ending in a dot -> names of its settings; the key of the top level is an empty text."""


def make_settings(
    from_file: Mapping[str, Any],
    from_command_line: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    parameters: int = UNKNOWN_SIZE,
) -> Settings:
    """Return the settings of a run; the command line overrides the file, and the file the defaults.

    Without a file and without inputs, the preset of the built-in task is used as the file. A
    section without a seed gets the seed of the run.

    Args:
        from_file: the parsed TOML file; empty if there is none.
        from_command_line: values by parameter name; None for parameters that were not given.
        overrides: texts of `--set`, see `read_overrides`; they are part of the command line.
        parameters: number of parameters of the policy; it determines the default learning rates
            and batch sizes.

    Raises:
        ConfigError: a setting is unknown, has the wrong type, is out of range, is missing, or
            contains a secret, or the command line gives it twice.
    """
    changes = read_overrides(overrides)
    for source in (from_file, from_command_line, changes):
        refuse_secrets(source)
    given = _as_tables(from_command_line)
    if twice := sorted(flatten(given).keys() & flatten(changes).keys()):
        raise ConfigError(f"{twice[0]} is given by an option and by --set. Give each setting once.")
    given = merge_tables(given, changes)
    if not from_file and not any(name in given for name in INPUTS):
        from_file = read_preset("tldr")
    table = merge_tables(from_file, given)
    table = _with_defaults(_with_one_seed(table), parameters)
    settings: Settings = read_section(Settings, table, "", SETTING_NAMES)
    return settings


def read_preset(name: str) -> dict[str, Any]:
    """Return the parsed preset `flows/presets/NAME.toml`."""
    return tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables of settings as one table whose keys are joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def needs_no_value(kind: Any, default: object) -> bool:
    """Return whether None must be written as NO_VALUE for a setting of this type and default."""
    # A learning rate that is left out gets the flow's default, so its None must be written.
    may_be_auto = {float, str} <= {*get_args(kind)}
    return NoneType in get_args(kind) and (default is not None or may_be_auto)


def read_section(
    kind: Any, table: Mapping[str, Any], where: str, known: Mapping[str, Collection[str]]
) -> Any:
    """Return an object of the dataclass `kind` with the values of a TOML table.

    Args:
        kind: the dataclass.
        table: the parsed table.
        where: name of the table with a dot; empty for the top level.
        known: names of all settings by section, as `names_by_section` returns them.

    Raises:
        ConfigError: a setting is unknown, has the wrong type or is out of range.
    """
    types = get_type_hints(kind)
    defaults = {one.name: one.default for one in fields(kind)}
    values = {}
    for given, value in table.items():
        key = OLD_NAMES.get(given, given)
        if key not in types:
            raise ConfigError(describe_unknown_setting(key, where, known))
        if key != given and key in table:
            raise ConfigError(
                f"{where}{given} is the old name of {where}{key}. Remove one of them."
            )
        if is_dataclass(types[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}{key}={value!r:.80} must be a section, [{where}{key}].")
            values[key] = read_section(types[key], value, f"{where}{key}.", known)
        elif value == NO_VALUE and _may_be_unset(types[key], defaults[key]):
            values[key] = None
        else:
            check_type(types[key], value, where + key)
            values[key] = value
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"[{where.removesuffix('.')}] {error}" if where else str(error)) from None


def _may_be_unset(kind: Any, default: object) -> bool:
    """Return whether the text NO_VALUE means None for a setting of this type and default."""
    parts = get_args(kind)
    # NO_VALUE may be the text of a text setting, and it is a choice of `ppo.sharding`.
    is_value = str in parts or any(NO_VALUE in get_args(part) for part in parts)
    return needs_no_value(kind, default) or (NoneType in parts and not is_value)


def _as_tables(from_command_line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that the user gave, as tables of a settings file."""
    given = {name: value for name, value in from_command_line.items() if value is not None}
    if "total_episodes" in given:
        given["ppo"] = {"total_episodes": given.pop("total_episodes")}
    return given


def _with_one_seed(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with the seed of the run in every section without a seed."""
    seed = table.get("seed", Settings.seed)
    sections = {name: table.get(name, {}) for name in ("sft", "reward_model_training", "ppo")}
    return {**table} | {
        name: {"seed": seed, **section} if isinstance(section, Mapping) else section
        for name, section in sections.items()
    }


def _with_defaults(table: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    """Return the table with the flow's defaults for a policy with this number of parameters."""
    # For PPO, the section `lora` is at the top level.
    places = {"sft": table.get("sft"), "reward_model_training": table.get("reward_model_training")}
    adapted = {name for name, place in {**places, "ppo": table}.items() if _has_adapters(place)}
    defaults = section_defaults(parameters, adapted)
    defaults["ppo"] |= kl_warning(table.get("promotion"))
    return {**table} | {
        name: with_section_defaults(name, table[name], section)
        for name, section in defaults.items()
        if isinstance(table[name], Mapping)
    }


def _has_adapters(table: object) -> bool:
    """Return whether a table has a section `lora` with a rank."""
    lora = table.get("lora") if isinstance(table, Mapping) else None
    return isinstance(lora, Mapping) and bool(lora.get("r"))


def settings_text(settings: Settings) -> str:
    """Return the settings as TOML, with a comment that explains how to use the file.

    `make_settings` returns equal settings for the parsed text. For a built-in task, pass the
    settings as they are before `prepare_inputs`, which adds inputs from the local cache.
    """
    table = _table(settings)
    for section in table.values():
        if isinstance(section, dict) and section.get("seed") == settings.seed:
            # A section without a seed uses the seed of the run, even if --seed changes the seed.
            del section["seed"]
    return COMMENT + tomli_w.dumps(table)


def _table(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a table, nested dataclasses as nested tables."""
    types = get_type_hints(type(config))
    table: dict[str, Any] = {}
    for one in fields(config):
        value = getattr(config, one.name)
        if is_dataclass(value):
            table[one.name] = _table(value)
        elif value is not None:
            table[one.name] = value
        elif needs_no_value(types[one.name], one.default):
            table[one.name] = NO_VALUE
    return table
