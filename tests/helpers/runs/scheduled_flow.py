"""The flow's commands for schedulers, with their code packages in a local S3."""

from collections.abc import Mapping
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.helpers.runs.forked_python import Ended, run_python
from tests.helpers.servers.servers import BUCKET


def flow_command(
    folder: Path,
    *arguments: str,
    nodes: object = 1,
    more: str = "",
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run the flow's command in `folder`, with a settings file there.

    Args:
        folder: working folder.
        arguments: words after `--config settings FILE`.
        nodes: num_nodes in the settings file.
        more: further lines of the settings file.
        variables: changes to the environment.
    """
    settings = folder / "settings.toml"
    settings.write_text(f'num_nodes = {nodes}\ntask = "tldr"\n{more}\n')
    words = (ROOT / "flows" / "rlhf.py", "--config", "settings", settings)
    found = {"PYTHONPATH": str(ROOT), **(variables or {})}
    return run_python(*words, *arguments, folder=folder, variables=found)


def deployment_variables(store: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the environment of commands that deploy, for the clients of a local S3."""
    return {
        **store,
        "AWS_ENDPOINT_URL": store["AWS_ENDPOINT_URL_S3"],
        "METAFLOW_S3_ENDPOINT_URL": store["AWS_ENDPOINT_URL_S3"],
        "METAFLOW_DEFAULT_DATASTORE": "s3",
        "METAFLOW_DATASTORE_SYSROOT_S3": f"s3://{BUCKET}/metaflow",
        # Metaflow keeps a token of the deployment there.
        "METAFLOW_HOME": str(home),
    }
