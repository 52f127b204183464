"""Collect what users say about served answers, and let people label pairs of answers.

    python flows/feedback.py collect NAME [--votes FILE] [--output-dir outputs/feedback]
    python flows/feedback.py label to-label.jsonl [--output labeled.jsonl]

NAME is the registered model whose answers `docs/champion_service.py NAME --record` serves.
`collect` writes feedback.jsonl and left-out.jsonl anew each time, so nothing is counted twice.
`python flows/rlhf.py run --set feedback=outputs/feedback/feedback.jsonl` trains on the feedback.
`label` opens a page on this machine, and saves each label at once.
"""

import argparse
import getpass
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pipeline.settings.environment import prepare_environment
from ppo_core.config.checks import refuse_secrets
from ppo_core.errors import ConfigError, DataError, PPOError
from ppo_core.io.atomic_files import explained_full_disk, require_writable


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 after an error."""
    arguments = _parser().parse_args(argv)
    try:
        refuse_secrets(vars(arguments))
        with explained_full_disk():
            (_collect if arguments.command == "collect" else _label)(arguments)
    except PPOError as error:
        print(f"feedback: {error}", file=sys.stderr)
        return 1
    return 0


def _collect(given: argparse.Namespace) -> None:
    from human_feedback.collect import collect, describe_feedback, write_feedback
    from human_feedback.read_traces import FoundOpinions, Scale, read_traces
    from human_feedback.read_votes import read_votes

    if (given.liked_from is None) != (given.disliked_to is None):
        raise ConfigError("--liked-from and --disliked-to belong together. Give both, or neither.")
    if given.liked_from is not None and given.disliked_to >= given.liked_from:
        raise ConfigError(
            f"--disliked-to {given.disliked_to:g} must be below --liked-from {given.liked_from:g}: "
            "a score cannot be both."
        )
    if given.half_life is not None and not given.half_life > 0:
        raise ConfigError(f"--half-life {given.half_life:g} must be above 0 days.")
    found = FoundOpinions()
    if not given.only_votes:
        scale = Scale(liked=given.liked_from, disliked=given.disliked_to)
        since = given.since and given.since.replace(tzinfo=given.since.tzinfo or UTC)
        found = read_traces(given.name, scale, experiment=given.experiment, since=since)
    for source in given.votes:
        opinions, left_out = read_votes(source)
        found.opinions += opinions
        found.left_out += left_out
    collected = collect(found.opinions, found.left_out, given.without_user)
    if not collected.opinions:
        raise DataError(
            f"No opinion on answers of '{given.name}' can be used: {len(collected.left_out)} are "
            f"left out, and {found.silent} answers have no feedback. Nothing was written."
        )
    path = write_feedback(collected, Path(given.output_dir), given.half_life)
    print("\n".join(describe_feedback(collected, found.silent)))
    print(f"Written to {path}. To train on it: --set feedback={path}")


def _label(given: argparse.Namespace) -> None:
    from human_feedback.label_server import label_server
    from human_feedback.labeling import Labeling
    from human_feedback.read_votes import read_pairs
    from pipeline.inputs.preference_pairs import votes_of

    rows = read_pairs(given.pairs)
    file = Path(given.output or Path(given.pairs).with_name("labeled.jsonl"))
    require_writable(file.parent, "output")
    if file.exists() and Path(given.pairs).exists() and file.samefile(given.pairs):
        raise ConfigError(f"--output {file} is the file of the pairs. Name another file.")
    labeling = Labeling(votes_of(rows), given.annotator or getpass.getuser(), file)
    try:
        server, address = label_server(labeling, given.port)
    except OSError as error:
        raise ConfigError(f"--port {given.port} cannot be used: {error}. Name another.") from error
    print(f"{labeling.done} of {len(rows)} pairs are labeled. Labels are saved in {file}")
    print(f"Open {address} in a browser, and press Ctrl+C at the end.", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    print(f"\n{labeling.done} of {len(rows)} pairs are labeled, in {file}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="feedback.py", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("collect", help="read traces and votes, and write training data")
    add.add_argument("name", help="registered model whose answers were judged")
    add.add_argument(
        "--votes",
        action="append",
        default=[],
        help="file of votes or judgments: jsonl, csv, parquet; may be repeated",
    )
    add.add_argument("--only-votes", action="store_true", help="read no traces")
    add.add_argument("--experiment", default="", help="MLflow experiment (default: NAME-served)")
    add.add_argument(
        "--since", type=datetime.fromisoformat, help="read no answers before this day or time"
    )
    add.add_argument("--liked-from", type=float, help="scores from this on are positive judgments")
    add.add_argument("--disliked-to", type=float, help="scores up to this are negative judgments")
    add.add_argument(
        "--half-life", type=float, help="days after which an opinion has half the weight"
    )
    add.add_argument(
        "--without-user", action="append", default=[], help="user to leave out; may be repeated"
    )
    add.add_argument("--output-dir", default="outputs/feedback", help="folder of the files")
    add = commands.add_parser("label", help="label pairs of answers on a page of this machine")
    add.add_argument("pairs", help="rows with prompt, first and second, such as to-label.jsonl")
    add.add_argument("--output", default="", help="file of the labels (default: labeled.jsonl)")
    add.add_argument("--annotator", default="", help="id of the person (default: the user's name)")
    add.add_argument("--port", type=int, default=0, help="port of the page (default: a free one)")
    return parser


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))
