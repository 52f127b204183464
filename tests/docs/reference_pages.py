"""The pages of the reference: settings, commands and functions, as the code describes itself."""

import ast
import dataclasses
import importlib
import inspect
import io
import pkgutil
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import patch

from metaflow import Parameter
from pydantic import TypeAdapter

import ppo_core
import ppo_core.algorithm
from deployment.deployment import Deployment
from flows.__main__ import FILES
from pipeline.results import evaluation, reward_report, run_cost, selection, summary
from pipeline.settings.settings import Settings
from ppo_core.config.argument_parser import field_docs
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.supervised.supervised_cli import SupervisedArguments, SupervisedLoraArguments
from ppo_core.supervised.supervised_config import SupervisedConfig
from tests.helpers.paths import ROOT

WIDTH = 88
"""Characters of a line of code that a page shows without scrolling."""

TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "null": "none",
}

BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}

SETTINGS_OF = {
    "PPOConfig": "ppo-settings.md",
    "SupervisedConfig": "flags.md",
    "ScriptArguments": "flags.md",
    "ModelConfig": "flags.md",
}
"""Public class of settings -> the page that lists them."""

FLOWS = {"rlhf": "RLHF", "retrain": "Retrain"}
"""Command that is a flow of Metaflow -> the class of the flow."""

MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])")
"""The module before the name of a class in a signature."""

SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\n((?:^(?: {4}.*)?\n?)+)", re.M)
"""A section of a docstring in Google's style."""


class UndocumentedError(Exception):
    """A part of the reference has no docstring."""


def reference_pages() -> dict[str, str]:
    """Return file name -> Markdown of each page of the reference.

    Raises:
        UndocumentedError: a setting, a command, a class or a function has no docstring.
    """
    return {
        "settings.md": _flow_settings(),
        "ppo-settings.md": "# Settings of PPO\n\n"
        "In the flow, the section `[ppo]`; in a script, `PPOConfig`; on the command line, flags of "
        "`python -m ppo_core`. The flow chooses some defaults by the size of the policy: see "
        "[your own data](../own-data.md).\n\n" + describe_settings(PPOConfig, level=2),
        "flags.md": _flags(),
        "deployment.md": "# The deployment file\n\n[Deploying](../deploying.md) has an example.\n\n"
        + "\n".join(_sections(Deployment, "")),
        "results.md": _results(),
        "commands.md": _commands(),
        "api.md": _api(),
        "formulas.md": _formulas(),
        "modules.md": _modules(),
    }


# --- Settings ------------------------------------------------------------------------


def _flow_settings() -> str:
    head = """# Settings of a run

A run reads them from a TOML file, `flows/rlhf.py --config settings FILE.toml run`, or from
`--set section.name=value`. The section `[ppo]` has a [page of its own](ppo-settings.md).

"""
    return head + "\n".join(_sections(Settings, "", left_out="ppo"))


def _flags() -> str:
    kinds = {
        "Data and models of `python -m ppo_core`": (ScriptArguments, ModelArguments),
        "`python -m ppo_core.supervised sft` and `reward`": (
            *(SupervisedArguments, SupervisedConfig, SupervisedLoraArguments),
        ),
    }
    parts = [
        "# Flags of the library's commands\n\nA flag is written `--name value`. "
        "`python -m ppo_core` also has all [settings of PPO](ppo-settings.md).\n"
    ]
    for title, members in kinds.items():
        parts += [f"## {title}\n", *(describe_settings(kind, level=3) for kind in members)]
    return "\n".join(parts)


def _sections(kind: Any, place: str, *, left_out: str = "") -> Iterator[str]:
    """Yield the page of a dataclass of settings, and then those of the dataclasses inside."""
    nested = {
        name: hint
        for name, hint in get_type_hints(kind).items()
        if dataclasses.is_dataclass(hint) and name != left_out
    }
    if place:
        yield f"## [{place}]\n\n{_summary(kind)}\n"
    else:
        yield "## Top level\n"
    yield describe_settings(kind, level=3, place=place, left_out={*nested, left_out})
    for name, hint in nested.items():
        yield from _sections(hint, f"{place}.{name}" if place else name)


def describe_settings(
    kind: Any, *, level: int, place: str = "", left_out: Collection[str] = ()
) -> str:
    """Return a heading, type, bounds, default and meaning for each field of a dataclass."""
    docs, hints = field_docs(kind), get_type_hints(kind, include_extras=True)
    parts = []
    for field in dataclasses.fields(kind):
        if field.name in left_out:
            continue
        if field.name not in docs:
            raise UndocumentedError(f"{kind.__name__}.{field.name} has no docstring.")
        anchor = f"{place}.{field.name}" if place else field.name
        parts.append(
            f"{'#' * level} `{anchor}`\n\n*{_in_words(hints[field.name])}; {_default(field)}*\n\n"
            f"{docs[field.name]}\n"
        )
    return "\n".join(parts)


def _in_words(hint: Any) -> str:
    """Return a type with its bounds in words."""
    schema = TypeAdapter(hint).json_schema()
    return _schema_in_words(schema, schema.get("$defs", {}))


def _schema_in_words(schema: dict[str, Any], known: dict[str, Any]) -> str:
    if "$ref" in schema:
        schema = known[schema["$ref"].rpartition("/")[2]]
    if several := schema.get("anyOf"):
        return " or ".join(_schema_in_words(one, known) for one in several)
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(f"`{choice!r}`" for choice in choices)
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_schema_in_words(schema.get('items', {}), known)}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"table of {_schema_in_words(inner, known)}" if isinstance(inner, dict) else "table"
    bounds = [f"{words} {schema[name]:,}" for name, words in BOUNDS.items() if name in schema]
    return ", ".join([TYPES.get(str(kind), "value"), *bounds])


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return f"default `{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"default `{field.default_factory()!r}`"
    return "required"


def _results() -> str:
    """Return the page of the records that a run writes as JSON."""
    parts = [
        "# Results of a run\n\nThe records in `summary.json` and in the reports of a run. "
        "[Metrics](../metrics.md) has the names of the figures in MLflow.\n"
    ]
    for module in (summary, evaluation, reward_report, run_cost, selection):
        for name, kind in vars(module).items():
            if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__:
                fields = (f"- `{field}`: {text}" for field, text in field_docs(kind).items())
                parts += [f"## {name}\n\n{_doc(kind)}\n", *fields, ""]
    return "\n".join(parts)


# --- Commands ------------------------------------------------------------------------


def _commands() -> str:
    """Return the page of the commands: what they do, and their parameters."""
    parts = [
        "# Commands\n\nOutside of the project's folder, write `python -m flows NAME` in place of "
        "`python flows/NAME.py`.\n"
    ]
    for name in FILES:
        module = importlib.import_module(name)
        parts.append(_flow(module) if name in FLOWS else _command(module))
    for name in ("ppo_core.__main__", "ppo_core.supervised.__main__", "ppo_core.diagnose"):
        words = f"python -m {name.removesuffix('.__main__')}"
        parts.append(f"## `{words}`\n\n{_markdown(_doc(importlib.import_module(name)))}\n")
    parts.append("The flags of the library's commands have [a page](flags.md).\n")
    return "\n".join(parts)


def _command(module: Any) -> str:
    """Return what a command does, and the help that it and its subcommands print."""
    helps = [_help_of(module.main, [])]
    if named := re.search(r"^ *\{([\w,]+)\}", helps[0], re.M):
        helps += [_help_of(module.main, [word]) for word in named[1].split(",")]
    parts = [f"## `python flows/{module.__name__}.py`\n", f"{_summary(module)}\n"]
    return "\n".join([*parts, *map(_code, helps)])


def _flow(module: Any) -> str:
    """Return the parameters and the steps of a flow of Metaflow."""
    flow = getattr(module, FLOWS[module.__name__])
    # By getattr: in vars(), a decorator takes the place of its step.
    members = [getattr(flow, name) for name in vars(flow)]
    options = [one for one in members if type(one) is Parameter]
    steps = [one for one in members if inspect.isfunction(one) and hasattr(one, "is_step")]
    for one in options:
        one.init()  # Metaflow does so when the flow starts.
    lines = [f"## `python flows/{module.__name__}.py run`\n", f"{_summary(module)}\n"]
    lines += [f"- `--{one.name}`: {one.kwargs['help']}" for one in options]
    lines += ["\nThe steps of the flow:\n", *(f"- `{one.name}`: {_summary(one)}" for one in steps)]
    return "\n".join(lines) + "\n"


def _help_of(main: Callable[[list[str]], object], words: list[str]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), patch.dict("os.environ", COLUMNS=str(WIDTH)):
        try:
            main([*words, "--help"])
        except SystemExit:
            return printed.getvalue()
    raise AssertionError(f"{words} --help did not end.")


# --- Functions and classes -----------------------------------------------------------


def _api() -> str:
    parts = [
        "# The public names of ppo_core\n\n`from ppo_core import NAME`. Importing the package does "
        "not import torch; a name is imported on first use.\n"
    ]
    return "\n".join(
        [*parts, *(_entry(name, getattr(ppo_core, name)) for name in ppo_core.__all__)]
    )


def _formulas() -> str:
    """Return the page of the public functions and classes in ppo_core.algorithm."""
    parts = [
        "# The formulas\n\nEverything in `ppo_core.algorithm`; it needs only torch. "
        "[The algorithm in one page](../algorithm.md) shows how they work together.\n"
    ]
    for found in pkgutil.iter_modules(ppo_core.algorithm.__path__):
        module = importlib.import_module(f"ppo_core.algorithm.{found.name}")
        parts.append(f"## ppo_core.algorithm.{found.name}\n\n{_markdown(_doc(module))}\n")
        own = {
            name: one
            for name, one in vars(module).items()
            if getattr(one, "__module__", "") == module.__name__ and not name.startswith("_")
        }
        parts += [_entry(name, one) for name, one in own.items()]
    return "\n".join(parts)


def _modules() -> str:
    """Return the page with each module and the first sentence of its docstring, by package."""
    parts = [
        "# Where to find it\n\nEvery module of the project, with the first sentence of its "
        "docstring. [The architecture](../architecture.md) has the order of the packages.\n"
    ]
    for package in sorted({path.parent for path in _sources()}):
        parts += [f"## {package}\n", "| module | subject |", "|---|---|"]
        for path in sorted((ROOT / package).glob("*.py")):
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if not doc:
                raise UndocumentedError(f"{path} has no docstring.")
            first = " ".join(doc.split("\n\n")[0].split()).replace("|", "\\|")
            parts.append(f"| `{path.name}` | {first} |")
        parts.append("")
    return "\n".join(parts)


def _sources() -> Iterator[Path]:
    """Yield the source files, relative to the repository."""
    for top in ("ppo_core", "flows"):
        yield from (path.relative_to(ROOT) for path in (ROOT / top).rglob("*.py"))


def _entry(name: str, found: Any) -> str:
    """Return heading, signature and docstring of a public name, with its fields and methods."""
    if isinstance(found, int | float | str):
        return f"### `{name}`\n\n{_code(str(found))}"
    is_record = dataclasses.is_dataclass(found)
    is_error = inspect.isclass(found) and issubclass(found, Exception)
    lines = [f"### `{name}`\n", "" if is_record or is_error else _signature(name, found)]
    lines.append(f"{_markdown(_doc(found))}\n")
    if page := SETTINGS_OF.get(name):
        lines.append(f"Its settings are in [{page.removesuffix('.md')}]({page}).\n")
    elif is_record:
        lines += [f"- `{field}`: {text}" for field, text in field_docs(found).items()]
    for method, one in vars(found).items() if inspect.isclass(found) else ():
        if inspect.isfunction(one) and not method.startswith("_"):
            lines += [f"#### `{name}.{method}`\n", _signature(method, one)]
            lines.append(f"{_markdown(_doc(one))}\n")
    return "\n".join(lines)


def _signature(name: str, found: Any) -> str:
    """Return the call of a function or class as code, in lines that fit a page."""
    signature = inspect.signature(found)
    kept = [one for one in signature.parameters.values() if one.name != "self"]
    signature = signature.replace(parameters=kept)
    line = MODULE.sub("", f"{name}{signature}")
    if len(line) <= WIDTH:
        return _code(line, "python")
    parts = [MODULE.sub("", str(one)) for one in kept]
    kinds = [one.kind for one in kept]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    body = "".join(f"    {part},\n" for part in parts)
    returned = "" if inspect.isclass(found) else line[line.rindex(")") + 1 :]
    return _code(f"{name}(\n{body}){returned}", "python")


def _doc(found: Any) -> str:
    if not (text := inspect.getdoc(found)):
        raise UndocumentedError(f"{found!r} has no docstring.")
    return text


def _summary(found: Any) -> str:
    return _doc(found).partition("\n\n")[0].replace("\n", " ")


def _markdown(text: str) -> str:
    """Return a docstring whose sections in Google's style are lists."""
    return SECTION.sub(_as_list, f"{text}\n").strip()


def _as_list(section: re.Match[str]) -> str:
    entries = re.findall(r"^\S.*(?:\n +.*)*", textwrap.dedent(section[2]), re.M)
    lines = [" ".join(entry.split()) for entry in entries]
    named = [re.sub(r"^([\w*, ]+): ", r"`\1`: ", line) for line in lines]
    return f"**{section[1]}**\n\n" + "".join(f"- {line}\n" for line in named)


def _code(text: str, language: str = "text") -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"
