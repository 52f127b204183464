"""Deploy the flows RLHF and Retrain to a scheduler, with the options of a deployment file.

The scheduler is Argo Workflows or Step Functions.

    python flows/deploy.py DEPLOYMENT.toml --check
    python flows/deploy.py DEPLOYMENT.toml --create
    python flows/deploy.py DEPLOYMENT.toml --start
    python flows/deploy.py DEPLOYMENT.toml --start --take-over
    python flows/deploy.py DEPLOYMENT.toml --status
    python flows/deploy.py DEPLOYMENT.toml --delete

`--check` compiles both flows and deploys nothing. `--status` changes nothing. `--start` starts
Retrain now; after a failed run, the new run reuses the models that were already trained. If the
failed run was killed, that run still has the lease: add `--take-over`. `--delete` deletes no runs,
models or data. To change a deployment that somebody else created, add `--authorize TOKEN`.
infra/deployments has an example for each scheduler.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from deployment.actions import (
    check_deployment,
    create_deployment,
    delete_deployment,
    show_deployment,
    start_deployment,
)
from deployment.deploy_flow import DeploymentFiles, read_deployment_file
from pipeline.settings.environment import run_and_exit
from ppo_core.errors import PPOError


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 after an error."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.authorize and arguments.act in (show_deployment, start_deployment):
        parser.error("--authorize has no effect with --status and --start: remove it.")
    act = arguments.act
    if arguments.take_over:
        if act is not start_deployment:
            parser.error("--take-over has an effect only with --start: remove it.")
        act = partial(start_deployment, take_over=True)
    try:
        act(read_deployment_file(arguments.file, arguments.authorize))
    except PPOError as error:
        print(f"deploy: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python flows/deploy.py",
        description="Deploy the flows RLHF and Retrain to Argo Workflows or Step Functions, as a "
        "deployment file describes.",
    )
    parser.add_argument("file", metavar="DEPLOYMENT.toml", type=Path, help="the deployment file")
    actions = parser.add_mutually_exclusive_group(required=True)

    def action(flag: str, act: Callable[[DeploymentFiles], None], does: str) -> None:
        actions.add_argument(flag, dest="act", action="store_const", const=act, help=does)

    action("--check", check_deployment, "compile both flows and print what would be deployed")
    action("--create", create_deployment, "deploy both flows, or change what is deployed")
    action("--start", start_deployment, "start Retrain now; trained models are reused")
    action("--status", show_deployment, "print what is deployed, the next start and the last run")
    action("--delete", delete_deployment, "delete both flows from the scheduler, but keep all data")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="with --start: take the lease from a run that is dead",
    )
    parser.add_argument(
        "--authorize",
        metavar="TOKEN",
        default="",
        help="production token, needed if somebody else made the deployment; --status prints it",
    )
    return parser


if __name__ == "__main__":
    run_and_exit(main)
