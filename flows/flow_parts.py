"""What both flows share: reading their settings, their code package, and their command."""

import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metaflow import FlowMutator, FlowSpec, Parameter
from metaflow.exception import MetaflowException
from metaflow.packaging_sys import ContentType

import ppo_core
from pipeline.settings.command_line import (
    check_settings_file,
    explain_unknown_options,
    name_resumed_run,
)
from pipeline.settings.environment import prepare_environment
from pipeline.settings.metaflow_secrets import keep_secrets_from_metaflow
from ppo_core.config.checks import refuse_secrets
from ppo_core.errors import ConfigError, PPOError


class RunStoppedError(MetaflowException):
    """Error of the project, which Metaflow prints without a traceback."""

    headline = "The run stopped"


@contextmanager
def explained_errors() -> Iterator[None]:
    """Raise an error of the project as one that Metaflow prints without a traceback."""
    try:
        yield
    except PPOError as error:
        raise RunStoppedError(str(error)) from error


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a settings file, which Metaflow will store."""
    try:
        tables = tomllib.loads(text.removeprefix("\ufeff"))
        refuse_secrets(tables)
    except ConfigError as error:
        raise RunStoppedError(str(error)) from error
    # ValueError: an error of syntax, or an integer of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise RunStoppedError(f"The settings file is not valid TOML: {error}.") from error
    return tables


class more_files(FlowMutator):  # noqa: N801
    """Package ppo_core, presets and GPUs for other machines, beside the modules of this folder.

    Each is listed by its suffix: Metaflow's own ways would package every file of ppo_core, such as
    a `.env`, and every .toml below this folder.
    """

    def add_to_package(self) -> Iterator[tuple[str, str, ContentType]]:
        """Yield the path, the name in the package and the kind of each file."""
        here, core = Path(__file__).resolve().parent, Path(ppo_core.__file__).resolve().parent
        for path in sorted(core.rglob("*.py")):
            yield str(path), str(path.relative_to(core.parent)), ContentType.CODE_CONTENT
        for path in [here / "gpus.toml", *sorted(here.glob("presets/*.toml"))]:
            yield str(path), str(path.relative_to(here)), ContentType.USER_CONTENT


def run_command(flow: type[FlowSpec]) -> None:
    """Run the command line of a flow."""
    prepare_environment()
    try:
        keep_secrets_from_metaflow(sys.argv[1:])
        check_settings_file(sys.argv)
        name_resumed_run(sys.argv, flow.__name__)
    except PPOError as wrong:
        sys.exit(f"{RunStoppedError.headline}:\n{wrong}")
    explain_unknown_options(
        [each.name for each in vars(flow).values() if isinstance(each, Parameter)]
    )
    flow()
