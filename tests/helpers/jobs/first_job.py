"""The first job of an execution, run up to its step: what it stores of the parameters."""

import json
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.kubernetes.argo_templates import filled

STEP = re.compile(
    r"; fi && (?:echo \S+ >> /tmp/mf-input-paths && )?"
    r"(python (?:-u )?rlhf\.py .+?) step start .*?\)(?= 1>>)"
)
"""The last commands of the job: they run the step."""


@dataclass(frozen=True)
class FirstJob:
    """The command of the first job of a compiled flow, and its environment."""

    script: str
    variables: Mapping[str, str]
    parameters: str
    """Place of the stored parameters, for the shell."""

    def run(self, folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run the commands before the step in an empty folder, and store the parameters."""
        dump = rf"; fi && \1 dump --file {folder}/stored {self.parameters})"
        script, count = STEP.subn(dump, self.script)
        assert count == 1, self.script
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        (folder / "job").mkdir()
        return subprocess.run(
            ["bash", "-c", script],
            cwd=folder / "job",
            env={
                "PATH": path,
                "HOME": str(folder),
                "METAFLOW_SKIP_INSTALL_DEPENDENCIES": "1",
                **variables,
                **self.variables,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def store(self, folder: Path, variables: Mapping[str, str]) -> dict[str, Any]:
        """Return the parameters that the job stores."""
        ran = self.run(folder, variables)
        assert (folder / "stored").exists(), ran.stdout[-3000:] + ran.stderr[-3000:]
        (stored,) = pickle.loads((folder / "stored").read_bytes()).values()
        return stored


def of_argo(template: Any, given: Mapping[str, str]) -> FirstJob:
    """The first pod of a workflow, whose parameters are `given` over those of its template."""
    arguments = template["spec"]["arguments"]["parameters"]
    parameters = {each["name"]: each["value"] for each in arguments} | given
    (pod,) = (each for each in template["spec"]["templates"] if each["name"] == "start")
    return FirstJob(
        script=filled(pod["container"]["command"][-1], parameters),
        variables={one["name"]: one["value"] for one in pod["container"]["env"] if "value" in one},
        parameters="argo-rlhf-1/_parameters/$METAFLOW_TASK_ID-params",
    )


def of_step_functions(states: Any, given: Mapping[str, Any] | str) -> FirstJob:
    """The first job of an execution, whose parameters are `given` or their JSON."""
    container = states["start"]["Parameters"]["ContainerOverrides"]
    text = given if isinstance(given, str) else json.dumps(given)
    filled_in = {"$$.Execution.Name": "rlhf-1", "$.Parameters": text}
    variables = {
        one["Name"]: one.get("Value") or filled_in.get(one["Value.$"], "7")
        for one in container["Environment"]
    }
    # A job whose parameters are stored keeps them.
    job = f"job-{time.time_ns()}"
    return FirstJob(
        script=container["Command"][-1],
        variables=variables | {"AWS_BATCH_JOB_ID": job, "AWS_BATCH_JOB_ATTEMPT": "1"},
        parameters=f"sfn-rlhf-1/_parameters/{job}-params",
    )


def as_argo_sends(values: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a workflow as Metaflow's `trigger` writes them."""
    return {name: json.dumps(value) for name, value in values.items()}
