"""Code that the flows RLHF and Retrain share: settings files, code package and command line."""

import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaflow import FlowMutator, FlowSpec, Parameter, current
from metaflow.exception import MetaflowException
from metaflow.packaging_sys import ContentType

import ppo_core
from metaflow_glue.command_line import (
    check_settings_file,
    explain_unknown_options,
    prepare_resume,
)
from metaflow_glue.execution_parameters import COMMANDS, quote_parameters
from metaflow_glue.metaflow_secrets import UNREDACTED, keep_secrets_from_metaflow
from pipeline.launch.forked_processes import ForkServer
from pipeline.settings.environment import prepare_environment
from ppo_core.config.field_checks import refuse_secrets
from ppo_core.errors import PPOError

if TYPE_CHECKING:
    from deployment.deployment import Alarms, Deployment


class RunStoppedError(MetaflowException):
    """An error of the project that Metaflow prints without a traceback."""

    headline = "The run stopped"


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turn an error of the project into one that Metaflow prints without a traceback."""
    try:
        yield
    except PPOError as error:
        raise RunStoppedError(str(error)) from error


def run_id() -> str:
    """Return the id FLOW/NUMBER of the current run."""
    return f"{current.flow_name}/{current.run_id}"


def alarms_of(flow: Any) -> "Alarms":
    """Return the alarm settings of the deployment file: the topic and the budget.

    Without a deployment, the topic is empty, and no alarm is sent.
    """
    from deployment.deployment_file import read_deployment

    return read_deployment(flow.file_deployment or {}).alarms


def parse_toml(text: str) -> dict[str, Any]:
    """Return the parsed settings file; refuse secrets in it, because Metaflow stores the result."""
    with explained_errors():
        tables = _tables_of(text, "settings")
        refuse_secrets(tables)
    return tables


def parse_deployment(text: str) -> dict[str, Any]:
    """Check a deployment file, and return the parsed file; Metaflow stores the result."""
    tables = _tables_of(text, "deployment")
    if tables:
        _deployment_of(tables)
    return tables


def _tables_of(text: str, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    # tomllib raises ValueError for a syntax error and for an integer with thousands of digits.
    except (ValueError, RecursionError) as error:
        raise RunStoppedError(f"The {what} file is not valid TOML: {error}.") from error


def _deployment_of(tables: Mapping[str, Any]) -> "Deployment":
    # Imported here, because only a run with a deployment needs it.
    from deployment.deployment_file import read_deployment

    with explained_errors():
        return read_deployment(tables)


class more_files(FlowMutator):  # noqa: N801
    """Add ppo_core, the presets and the GPU table to the code package for other machines.

    Metaflow itself packages the modules in this folder. This class selects the other files by
    suffix, because Metaflow's own options would package every file of ppo_core, even a `.env`, and
    every .toml file below this folder.
    """

    def add_to_package(self) -> Iterator[tuple[str, str, ContentType]]:
        """Yield the path, the name in the package and the kind of each file."""
        here, core = Path(__file__).resolve().parent, Path(ppo_core.__file__).resolve().parent
        for path in sorted(core.rglob("*.py")):
            yield str(path), str(path.relative_to(core.parent)), ContentType.CODE_CONTENT
        for path in [here / "gpus.toml", *sorted(here.glob("presets/*.toml"))]:
            yield str(path), str(path.relative_to(here)), ContentType.USER_CONTENT


class deployment_of_file(FlowMutator):  # noqa: N801
    """Add the schedule, machines and rights from the deployment file to a flow.

    Without a deployment file, the flow is not changed. Metaflow applies the decorators of a class
    from the bottom up. Write this mutator above a mutator that replaces steps, so that this mutator
    is applied last.
    """

    def init(self, *, is_scheduled: bool = False) -> None:
        """Store whether the schedule in the deployment file starts this flow."""
        self.is_scheduled = is_scheduled

    def pre_mutate(self, mutable_flow: Any) -> None:
        """Add the decorators before Metaflow reads the graph."""
        if tables := dict(mutable_flow.configs)["deployment"]:
            from deployment.step_decorators import add_decorators

            deployment = _deployment_of(tables)
            add_decorators(mutable_flow, deployment, is_scheduled=self.is_scheduled)


RUN_COMMANDS = {"run", "resume"}
"""Commands that execute the steps of a flow on this machine."""


def run_command(
    flow: type[FlowSpec], *, is_brief: bool = False, imported: Sequence[str] = ()
) -> None:
    """Run the command line of a flow.

    Args:
        flow: class of the flow.
        is_brief: whether a run prints only a few lines per step, or a panel on a terminal; see
            `run_terminal`.
        imported: modules that a run imports once for all its steps; see `forked_steps`.
    """
    prepare_environment()
    try:
        keep_secrets_from_metaflow(sys.argv[1:])
        check_settings_file(sys.argv)
        prepare_resume(sys.argv, flow.__name__)
    except PPOError as wrong:
        sys.exit(f"{RunStoppedError.headline}:\n{wrong}")
    parameters = [each.name for each in vars(flow).values() if isinstance(each, Parameter)]
    explain_unknown_options(parameters)
    if set(COMMANDS.values()) & set(sys.argv):
        quote_parameters(parameters)
        if UNREDACTED in os.environ:
            # In a redacted definition, `compile_flow` could not find the secrets.
            sys.stdout = sys.__stdout__
    # Import the following modules here, because the process of a step does not need them.
    is_run = bool(RUN_COMMANDS & set(sys.argv))
    if is_run and is_brief:
        from metaflow_glue.run_terminal import show_run_briefly

        show_run_briefly(flow, sys.argv)
    if is_run and imported:
        from metaflow_glue.forked_steps import fork_steps

        fork_steps(imported)
    if server := ForkServer.of_this_process:
        from metaflow_glue.forked_steps import fork_cards

        fork_cards(server)
    flow()
