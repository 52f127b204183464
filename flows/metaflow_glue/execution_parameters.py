"""Pass the parameters of a scheduled execution to the first step, quoted for the shell.

The first job of an execution writes the parameters to a file, which the job's shell then reads.
Metaflow's own command writes each value as JSON. The shell would then execute `$(...)` in a value,
with the rights of the first step. These commands write the file instead:

    python -m metaflow_glue.execution_parameters step-functions FILE NAME ...
    python -m metaflow_glue.execution_parameters argo FILE NAME,IS_NONE,VALUE_IN_BASE64 ...
"""

import base64
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from ppo_core.errors import ConfigError

MODULE = "metaflow_glue.execution_parameters"

ARGO = re.compile(r"metaflow\.plugins\.argo\.set_parameters (\w+)")
STEP_FUNCTIONS = re.compile(
    r"metaflow\.plugins\.aws\.step_functions\.set_batch_environment parameters (\w+)"
)
"""Patterns of Metaflow's commands that write the file; the group matches the name of the file."""

COMMANDS = {"argo": "argo-workflows", "step-functions": "step-functions"}
"""Scheduler -> Metaflow's command group that deploys a flow to this scheduler."""


def quote_parameters(names: Collection[str]) -> None:
    """Make Metaflow use the commands of this module in the jobs that it compiles.

    Metaflow has no hook for this. Therefore this function replaces `bash_capture_logs`, with which
    Metaflow wraps the commands of a job to capture their logs.

    Args:
        names: the parameters of the flow. An execution of Step Functions that sets another
            parameter is refused.
    """
    # Imported here, because only a deployment needs the clients of the schedulers.
    from metaflow.plugins.argo import argo_workflows
    from metaflow.plugins.aws.batch import batch

    capture_logs = argo_workflows.bash_capture_logs

    def quoted(commands: str, *arguments: Any) -> str:
        commands = ARGO.sub(rf"{MODULE} argo \1", commands)
        listed = " ".join(names)
        commands = STEP_FUNCTIONS.sub(rf"{MODULE} step-functions \1 {listed}", commands)
        return str(capture_logs(commands, *arguments))

    argo_workflows.bash_capture_logs = batch.bash_capture_logs = quoted


def read_step_functions(names: Collection[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters of an execution of Step Functions.

    A parameter that the execution does not set has the flow's default.

    Raises:
        ConfigError: the input is not a JSON object, or has a parameter that the flow lacks.
    """
    given = environment.get("METAFLOW_PARAMETERS", "{}")
    try:
        values = json.loads(given)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(
            f"The parameters of this execution, {given!r:.200}, are not a JSON object. Start "
            'it with an input such as {"Parameters": "{\\"policy\\": \\"my-model\\"}"}.'
        )
    known = {_variable(name) for name in names}
    if unknown := [name for name in values if _variable(name) not in known]:
        raise ConfigError(
            f"The flow has no parameter {unknown[0]!r:.200}, so this execution would ignore its "
            f"value. The parameters are {', '.join(sorted(names))}."
        )
    return {**json.loads(environment.get("METAFLOW_DEFAULT_PARAMETERS", "{}")), **values}


def read_argo(words: Sequence[str]) -> dict[str, str | None]:
    """Return the parameters of a workflow.

    Each word is NAME,IS_NONE,VALUE. VALUE is in base64. IS_NONE is `t` if the parameter's
    default is None. VALUE is then `null`, unless the execution sets the parameter.
    """
    values: dict[str, str | None] = {}
    for word in words:
        name, is_none, value = word.split(",")
        text = base64.b64decode(value).decode()
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = text
        # `argo-workflows trigger` sends a string as a JSON string. Other values stay as they are.
        values[name] = parsed if isinstance(parsed, str) else text
        if text == "null" and is_none == "t":
            values[name] = None
    return values


def exports(values: Mapping[str, Any]) -> str:
    """Return shell commands that export the values; leave out a value of None.

    Raises:
        ConfigError: a value has a null character, which no variable can contain.
    """
    lines = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if "\0" in text:
            raise ConfigError(
                f"The parameter {name!r:.200} has a null character, which the shell would drop. "
                "Remove the null character, and start the execution again."
            )
        if value is not None:
            lines.append(f"export METAFLOW_INIT_{_variable(name)}={quote(text)}\n")
    return "".join(lines)


def _variable(name: str) -> str:
    return name.upper().replace("-", "_")


def main(argv: Sequence[str]) -> int:
    """Write the file; return 0, or 1 after an error."""
    scheduler, file, *words = argv
    try:
        read = read_argo(words) if scheduler == "argo" else read_step_functions(words, os.environ)
        Path(file).write_text(exports(read), encoding="utf-8")
    except ConfigError as error:
        print(f"The run stopped:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
