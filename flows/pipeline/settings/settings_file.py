"""Write the complete settings of a run as a TOML file that repeats the run."""

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import tomli_w

from pipeline.settings.settings import NO_VALUE, Settings, needs_no_value

COMMENT = """\
# The complete settings of a run of the flow, including defaults. To repeat the run:
#
#     python flows/rlhf.py --config settings FILE run
#
# FILE is this file. Flags override this file; a section without a seed uses --seed. Paths are
# unchanged, so start the run in a folder in which the relative paths are valid. A setting
# that is missing here is None, except the seed of a section.

"""


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
