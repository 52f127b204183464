"""Show or change the champion of a registered model: the version that production loads.

    python flows/registry.py show NAME
    python flows/registry.py history NAME
    python flows/registry.py audit NAME
    python flows/registry.py rollback NAME [--reason TEXT]
    python flows/registry.py promote NAME VERSION --reason TEXT
    python flows/registry.py rows NAME VERSION
    python flows/registry.py saw NAME ROW_OR_FILE
    python flows/registry.py watch NAME [--withdraw]

Only `rollback`, `promote` and `watch --withdraw` change something. MLFLOW_TRACKING_URI names the
registry.
"""

import argparse
import getpass
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from pipeline.settings.environment import run_and_exit
from ppo_core.config.field_checks import refuse_secrets
from ppo_core.errors import ConfigError, DataError, PPOError
from ppo_core.io.atomic_files import explained_full_disk
from ppo_core.reporting.escaping import one_line


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 after an error."""
    arguments = _parser().parse_args(argv)
    try:
        refuse_secrets(vars(arguments))
        with explained_full_disk():
            _check_registry(arguments)
            arguments.run(arguments)
    except PPOError as error:
        print(f"registry: {error}", file=sys.stderr)
        return 1
    return 0


def show(given: argparse.Namespace) -> None:
    """Print the champion, the previous champion and the challenger.

    Also print the aliases that contradict the history.
    """
    from pipeline.registry.aliases import CHALLENGER, CHAMPION, PREVIOUS, read_aliases
    from pipeline.registry.change_champion import read_champions

    name = given.name
    champions, aliases = read_champions(name), read_aliases(name)
    for alias in (CHAMPION, PREVIOUS, CHALLENGER):
        _print_version(name, alias, aliases.get(alias))
    recorded = {CHAMPION: champions.champion, PREVIOUS: champions.previous}
    differences = [
        f"The alias {alias} is {_version(aliases.get(alias))}, but the history says "
        f"{_version(version)}."
        for alias, version in recorded.items()
        if aliases.get(alias) != version
    ]
    print("\n".join(differences) or "Aliases and history agree.")


def history(given: argparse.Namespace) -> None:
    """Print all decisions about the registered model, oldest first."""
    from pipeline.registry.change_champion import read_champions

    decisions = read_champions(given.name).decisions
    for made in decisions:
        _print_block(
            f"{made.number}. {made.action} {_version(made.version)}; "
            f"champion: {_version(made.champion)}",
            f"{made.at}, by {made.by}",
            *made.reasons,
        )
    if not decisions:
        print(f"Nothing was decided about {given.name} yet.")


def audit(given: argparse.Namespace) -> None:
    """Print the outcome, reasons and inputs of each run for the registered model, oldest first.

    The reasons are those of the run's own decision, also if somebody else decided later.
    """
    from pipeline.inputs.lineage import FLOW_RUN, is_origin
    from pipeline.tracking.decided_runs import outcome_of, reason_of_outcome, runs_of_model

    runs = runs_of_model(given.name)
    for run in runs:
        tags = run.data.tags
        reasons = reason_of_outcome(run)
        if version := tags.get("version"):
            reasons = _reasons_of(f"run {tags[FLOW_RUN]}", given.name, int(version)) or reasons
        started = datetime.fromtimestamp(run.info.start_time / 1000, UTC)
        _print_block(
            f"{tags[FLOW_RUN]}: {outcome_of(run)}",
            started.isoformat(timespec="seconds"),
            *reasons.splitlines(),
            *(f"{tag} {tags[tag]}" for tag in sorted(tags) if is_origin(tag)),
        )
    if not runs:
        print(f"No run for {given.name} is recorded.")


def _reasons_of(by: str, name: str, version: int) -> str:
    """Return the reasons of a run's decision on a version; empty if they are not recorded."""
    from pipeline.registry.aliases import read_version
    from pipeline.registry.change_champion import read_champions

    tags = read_version(name, version).tags
    # The tags have the last decision on the version; the history has all decisions.
    if tags.get("promotion_by", by) != by and (made := read_champions(name).decided(by, version)):
        return "\n".join(made.reasons)
    return tags.get("promotion_reasons", "")


def rows(given: argparse.Namespace) -> None:
    """Print the data set and the digest of each row from which a version was made."""
    from pipeline.registry.seen_rows import require_rows_of

    found = require_rows_of(given.name, given.version)
    whole = found.filter(found["is_row"]).to_pylist()
    for row in whole:
        print(row["data_set"], row["digest"].hex())
    counts = Counter(row["data_set"] for row in whole)
    counted = ", ".join(f"{use} {count}" for use, count in counts.items())
    print(f"Different rows of version {given.version}: {counted}", file=sys.stderr)


def saw(given: argparse.Namespace) -> None:
    """Print the versions that were made from a row or from the rows of a file."""
    from pipeline.inputs.row_digests import digests_of_raw, read_digests
    from pipeline.registry.seen_rows import describe_versions_that_saw

    if given.rows.lstrip().startswith("{"):
        asked = [digests_of_raw(_parse_row(given.rows), "The row", {})]
    else:
        asked = read_digests(given.rows, {}, allow_urls=False)
    print("\n".join(describe_versions_that_saw(given.name, asked)))


def watch(given: argparse.Namespace) -> None:
    """Print whether users like the champion less than the previous champion.

    With `--withdraw`, withdraw a champion that users like less.
    """
    from human_feedback.withdraw_champion import watch_champion

    if not 0 < given.alpha <= 0.5 or not 0 <= given.margin < 1:
        raise ConfigError(
            f"--alpha {given.alpha:g} must be above 0 and at most 0.5, and --margin "
            f"{given.margin:g} at least 0 and below 1."
        )
    print(
        watch_champion(
            given.name,
            by=_person(),
            alpha=given.alpha,
            margin=given.margin,
            withdraw=given.withdraw,
        )
    )


def _parse_row(text: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise DataError(
            f"The row {text!r:.80} is not a JSON object: {error}. Give the row as a line of JSON "
            "Lines, or the name of a file."
        ) from error
    return row


def _roll_back(given: argparse.Namespace) -> None:
    from pipeline.registry.change_champion import roll_back

    decision = roll_back(given.name, reason=given.reason, by=_person())
    print(
        f"Version {decision.version} of {given.name} was withdrawn; version {decision.champion} is "
        "champion again."
    )


def _promote(given: argparse.Namespace) -> None:
    from pipeline.registry.change_champion import promote_by_hand

    decision = promote_by_hand(given.name, given.version, reason=given.reason, by=_person())
    print(f"Version {decision.version} of {given.name} is champion.")


def _check_registry(given: argparse.Namespace) -> None:
    # Imported here: MLflow reads the prepared environment when it is imported.
    from pipeline.registry.aliases import require_registered
    from pipeline.tracking.mlflow_client import check_databases, check_model_name, check_registry

    check_model_name(given.name)
    check_databases(must_exist=True)
    check_registry(given.name)
    # If all runs so far were refused before they registered a version, there are runs to audit, but
    # no registered model.
    if given.command != "audit":
        require_registered(given.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python flows/registry.py",
        description="Show or change which version of a registered model production loads.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], None], does: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=does, description=does)
        added.set_defaults(run=run)
        added.add_argument("name", metavar="NAME", help="name of the registered model")
        return added

    command("show", show, "Print the champion, the previous champion and the challenger.")
    command("history", history, "Print every decision with its author and reasons.")
    command(
        "audit",
        audit,
        "Print the outcome, reasons and inputs of every run.",
    )
    made_from = command("rows", rows, "Print the digest of each row that a version was made from.")
    made_from.add_argument("version", metavar="VERSION", type=int, help="number of the version")
    seen = command(
        "saw",
        saw,
        "Print the versions that were made from a row, or from rows of a file.",
    )
    seen.add_argument("rows", metavar="ROW_OR_FILE", help="a row as JSON, or a data set")
    watched = command(
        "watch",
        watch,
        "Compare users' feedback on the champion and on the previous champion.",
    )
    watched.add_argument("--withdraw", action="store_true", help="withdraw a worse champion")
    watched.add_argument(
        "--alpha", type=float, default=0.01, help="probability of a false alarm (default 0.01)"
    )
    watched.add_argument(
        "--margin", type=float, default=0.0, help="accepted loss in the share of liked answers"
    )
    rollback = command("rollback", _roll_back, "Make the previous champion the champion again.")
    rollback.add_argument("--reason", default="No reason was given.", help="text for the history")
    promote = command(
        "promote", _promote, "Make a version the champion, even if the flow refused it."
    )
    promote.add_argument("version", metavar="VERSION", type=int, help="number of the version")
    promote.add_argument("--reason", required=True, help="text for the history")
    return parser


def _print_version(name: str, alias: str, version: int | None) -> None:
    """Print the version that an alias points at, with its promotion decision and win rates."""
    from pipeline.registry.aliases import read_version
    from pipeline.reports.terminal import CONTEST_TITLES

    if version is None:
        _print_block(f"{alias}: none")
        return
    notes = read_version(name, version)
    at, by, reasons = (notes.tags.get(f"promotion_{what}") for what in ("at", "by", "reasons"))
    rates = (f"{CONTEST_TITLES.get(one, one)}: {rate:.1%}" for one, rate in notes.win_rates.items())
    _print_block(
        f"{alias}: version {version}, {notes.tags.get('promotion', 'not decided yet')}",
        *([f"{at}, by {by}"] if at else []),
        *(reasons or "").splitlines(),
        *rates,
    )


def _version(version: int | None) -> str:
    return "none" if version is None else f"version {version}"


def _print_block(head: str, *lines: str) -> None:
    """Print indented lines below a heading; replace unprintable characters with spaces."""
    for line in (head, *(f"    {line}" for line in lines)):
        print(one_line(line))
    print()


def _person() -> str:
    return f"person {os.environ.get('METAFLOW_USER') or getpass.getuser()}"


if __name__ == "__main__":
    run_and_exit(main)
