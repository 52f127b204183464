"""Which version of a registered model production loads: look at it, and change it by hand.

    python flows/registry.py show NAME
    python flows/registry.py history NAME
    python flows/registry.py rollback NAME [--reason TEXT]
    python flows/registry.py promote NAME VERSION --reason TEXT

`show` and `history` change nothing. The registry is that of MLFLOW_TRACKING_URI.
"""

import argparse
import getpass
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.environment import prepare_environment
from ppo_core.errors import PPOError

PROMOTION_TAGS = ("promotion", "promotion_at", "promotion_by", "promotion_reasons")
"""Tags of a version that say what was decided about it."""


def main(argv: Sequence[str]) -> int:
    """Do what was asked; returns 0, or 1 where it cannot be done."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except PPOError as error:
        print(f"registry: {error}", file=sys.stderr)
        return 1
    return 0


def show(name: str) -> None:
    """Print the champion, the one before and the challenger, and whether aliases agree."""
    from pipeline.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS, read_aliases
    from pipeline.registry.champions import read_champions

    champions, aliases = read_champions(name), read_aliases(name)
    shown = (CHAMPION, PREVIOUS, CHALLENGER)
    table = _table(name, "", *shown)
    columns = [_describe(name, aliases.get(alias)) for alias in shown]
    for label, *cells in zip(("version", *PROMOTION_TAGS, "win rates"), *columns, strict=True):
        _add_row(table, label.replace("_", " "), *cells)
    Console().print(table)
    said = {CHAMPION: champions.champion, PREVIOUS: champions.previous}
    differences = [
        f"The alias {alias} is {_version(aliases.get(alias))}, by the history it is "
        f"{_version(version)}."
        for alias, version in said.items()
        if aliases.get(alias) != version
    ]
    print("\n".join(differences) or "Aliases and history agree.")


def history(name: str) -> None:
    """Print every decision on the registered model, the oldest first."""
    from pipeline.registry.champions import read_champions

    decisions = read_champions(name).decisions
    table = _table(name, "#", "at", "action", "version", "champion", "by", "reasons")
    for decision in decisions:
        _add_row(
            table,
            str(decision.number),
            decision.at,
            decision.action,
            str(decision.version),
            _version(decision.champion),
            decision.by,
            "\n".join(decision.reasons),
        )
    Console().print(table)


def _run(arguments: argparse.Namespace) -> None:
    # After the environment has been prepared: MLflow reads it when it is imported.
    from pipeline.registry.champions import promote_by_hand, roll_back
    from pipeline.registry.connection import check_registry

    name = arguments.name
    check_registry(name)
    if arguments.command == "show":
        show(name)
    elif arguments.command == "history":
        history(name)
    elif arguments.command == "rollback":
        decision = roll_back(name, reason=arguments.reason, by=_person())
        print(
            f"Version {decision.version} of {name} was withdrawn; version {decision.champion} is "
            "champion again."
        )
    else:
        decision = promote_by_hand(name, arguments.version, reason=arguments.reason, by=_person())
        print(f"Version {decision.version} of {name} is champion.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python flows/registry.py",
        description="Which version of a registered model production loads.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, does: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=does, description=does)
        added.add_argument("name", metavar="NAME", help="name of the registered model")
        return added

    command("show", "The champion, the one before, the challenger, and whether aliases agree.")
    command("history", "Every decision, who made it, and why.")
    rollback = command("rollback", "Withdraw the champion: the one before it is champion again.")
    rollback.add_argument("--reason", default="No reason was given.", help="why, for the history")
    promote = command("promote", "Make a version champion, whatever its judgement says.")
    promote.add_argument("version", metavar="VERSION", type=int, help="number of the version")
    promote.add_argument("--reason", required=True, help="why, for the history")
    return parser


def _describe(name: str, version: int | None) -> list[str]:
    """The cells of a version: its number, its tags, its win rates."""
    from pipeline.registry.aliases import read_version

    if version is None:
        return ["none", *[""] * len(PROMOTION_TAGS), ""]
    notes = read_version(name, version)
    rates = "\n".join(f"{contest} {rate:.1%}" for contest, rate in notes.win_rates.items())
    return [str(version), *(notes.tags.get(tag, "") for tag in PROMOTION_TAGS), rates]


def _version(version: int | None) -> str:
    return "none" if version is None else f"version {version}"


def _table(title: str, *headers: str) -> Table:
    table = Table(title=Text(title), show_lines=True)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Add cells as they are: what somebody wrote is neither markup nor a terminal's command."""
    table.add_row(
        *(Text("".join(c if c.isprintable() or c == "\n" else " " for c in cell)) for cell in cells)
    )


def _person() -> str:
    return f"person {os.environ.get('METAFLOW_USER') or getpass.getuser()}"


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))
