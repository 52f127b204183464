"""Deploy both flows to Argo Workflows or Step Functions, as one file says.

    python flows/deploy.py DEPLOYMENT.toml --check
    python flows/deploy.py DEPLOYMENT.toml --create
    python flows/deploy.py DEPLOYMENT.toml --status
    python flows/deploy.py DEPLOYMENT.toml --delete

`--check` compiles both flows and applies nothing; `--status` changes nothing. `--delete` leaves
runs, models and data alone. infra/deployments has an example for each scheduler.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deployment.actions import (
    check_deployment,
    create_deployment,
    delete_deployment,
    show_deployment,
)
from deployment.flow_commands import read_deployment_file
from pipeline.settings.environment import prepare_environment
from ppo_core.errors import PPOError

ACTIONS = {
    "check": (check_deployment, "Compile both flows and print what would be deployed."),
    "create": (create_deployment, "Deploy both flows, or change what is deployed."),
    "delete": (delete_deployment, "Delete both flows from the scheduler, and no data."),
    "status": (show_deployment, "Print what is deployed, the next run, and the last result."),
}


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 after an error."""
    arguments = _parser().parse_args(argv)
    act, _ = ACTIONS[arguments.action]
    try:
        act(read_deployment_file(arguments.file))
    except PPOError as error:
        print(f"deploy: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python flows/deploy.py",
        description="Deploy both flows to Argo Workflows or Step Functions, as one file says.",
    )
    parser.add_argument("file", metavar="DEPLOYMENT.toml", type=Path, help="the deployment file")
    actions = parser.add_mutually_exclusive_group(required=True)
    for name, (_, does) in ACTIONS.items():
        actions.add_argument(
            f"--{name}", dest="action", action="store_const", const=name, help=does
        )
    return parser


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))
