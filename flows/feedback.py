"""Collect what users say about served answers; choose pairs of answers and let people label them.

    python flows/feedback.py collect NAME [--votes FILE] [--output-dir outputs/feedback]
    python flows/feedback.py choose --policy MODEL --prompts DATA --labels 200
    python flows/feedback.py disputed outputs/runs/RUN/judgements.jsonl --reward-model FOLDER
    python flows/feedback.py label to-label.jsonl [--output labeled.jsonl]
    python flows/feedback.py to-label-studio to-label.jsonl
    python flows/feedback.py from-label-studio export.json

NAME is the registered model whose answers `docs/champion_service.py NAME --record` serves.
`collect` writes feedback.jsonl and left-out.jsonl anew each time, so nothing is counted twice.
`python flows/rlhf.py run --set feedback=outputs/feedback/feedback.jsonl` trains on the feedback.
`choose` samples answers and writes the pairs that people should label, `disputed` those that judge
and reward model order differently. `label` opens a page on this machine, and saves each label at
once. The last two commands take the pairs to Label Studio, and bring the labels back.
"""

import argparse
import getpass
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pipeline.settings.environment import prepare_environment
from ppo_core.config.checks import refuse_secrets
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError, DataError, PPOError
from ppo_core.io.atomic_files import explained_full_disk, require_writable


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 after an error."""
    arguments = _parser().parse_args(argv)
    try:
        refuse_secrets(vars(arguments))
        with explained_full_disk():
            arguments.run(arguments)
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


def _choose(given: argparse.Namespace) -> None:
    from human_feedback.choose_pairs import PairChoice, pairs_to_label, write_pairs

    output = _output(given.output, Path("to-label.jsonl"))
    chosen = {name: getattr(given, name) for name in _CHOICE}
    pairs = pairs_to_label(PairChoice(**chosen), Path(given.output_dir) / "cache")
    write_pairs(pairs, output)
    how = "drawn at random"
    if given.reward_model:
        deviations = sorted(pair.deviation for pair in pairs)
        how = (
            "on which the members of the reward model differ most: the deviation of the "
            f"probability is {deviations[-1]:.2f} to {deviations[0]:.2f}"
        )
    _say_what_is_next(output, len(pairs), how)


def _disputed(given: argparse.Namespace) -> None:
    from human_feedback.choose_pairs import disputed_pairs, write_pairs

    output = _output(given.output, Path(given.judgements).with_name("disputed.jsonl"))
    pairs = disputed_pairs(given.judgements, given.reward_model, given.labels)
    write_pairs(pairs, output)
    _say_what_is_next(output, len(pairs), "whose better answer judge and reward model disagree on")


def _say_what_is_next(output: Path, pairs: int, how: str) -> None:
    print(f"{output} has {pairs} pairs {how}.")
    print(f"Next: python flows/feedback.py label {shlex.quote(str(output))}")


def _to_label_studio(given: argparse.Namespace) -> None:
    from human_feedback.label_studio import INTERFACE, write_tasks
    from human_feedback.read_votes import read_pairs
    from pipeline.inputs.preference_pairs import votes_of

    output = _output(given.output, Path(given.pairs).with_name("label-studio.json"))
    pairs = votes_of(read_pairs(given.pairs))
    write_tasks(pairs, output)
    print(f"{output} has {len(pairs)} tasks. Import them into a project with this interface:")
    print(INTERFACE)
    print("Then export in the format JSON: python flows/feedback.py from-label-studio EXPORT")


def _from_label_studio(given: argparse.Namespace) -> None:
    from human_feedback.label_studio import labels_of_export
    from pipeline.inputs.json_lines import write_jsonl

    output = _output(given.output, Path(given.export).with_name("labeled.jsonl"))
    rows = labels_of_export(Path(given.export))
    write_jsonl(output, rows)
    print(f"{output} has {len(rows)} labels of {len({row['annotator'] for row in rows})} persons.")


def _output(named: str, default: Path) -> Path:
    """Return the file to write, whose folder can be written."""
    output = Path(named) if named else default
    require_writable(output.parent, "output")
    return output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="feedback.py", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_collect(commands.add_parser("collect", help="read traces and votes, write training data"))
    _add_choose(commands.add_parser("choose", help="sample answers, choose pairs to label"))
    add = commands.add_parser(
        "disputed", help="write the pairs that judge and reward model dispute"
    )
    add.set_defaults(run=_disputed)
    add.add_argument("judgements", help="judgements.jsonl of a run")
    add.add_argument("--reward-model", required=True, help="folder of a reward model")
    add.add_argument("--labels", type=int, default=100, help="maximum number of pairs")
    add.add_argument("--output", default="", help="file of the pairs (default: disputed.jsonl)")
    add = commands.add_parser("label", help="label pairs of answers on a page of this machine")
    add.set_defaults(run=_label)
    add.add_argument("pairs", help="rows with prompt, first and second, such as to-label.jsonl")
    add.add_argument("--output", default="", help="file of the labels (default: labeled.jsonl)")
    add.add_argument("--annotator", default="", help="id of the person (default: the user's name)")
    add.add_argument("--port", type=int, default=0, help="port of the page (default: a free one)")
    add = commands.add_parser("to-label-studio", help="write pairs as tasks of Label Studio")
    add.set_defaults(run=_to_label_studio)
    add.add_argument("pairs", help="rows with prompt, first and second, such as to-label.jsonl")
    add.add_argument("--output", default="", help="file of the tasks (default: label-studio.json)")
    add = commands.add_parser("from-label-studio", help="read the labels of a JSON export")
    add.set_defaults(run=_from_label_studio)
    add.add_argument("export", help="file that Label Studio exported in the format JSON")
    add.add_argument("--output", default="", help="file of the labels (default: labeled.jsonl)")
    return parser


def _add_collect(add: argparse.ArgumentParser) -> None:
    add.set_defaults(run=_collect)
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


_CHOICE = "policies prompts labels reward_model samples response_length temperature seed".split()
"""Arguments of `choose` that are fields of `PairChoice`."""


def _add_choose(add: argparse.ArgumentParser) -> None:
    add.set_defaults(run=_choose)
    add.add_argument(
        "--policy",
        dest="policies",
        action="append",
        required=True,
        help="folder or models:/NAME@ALIAS; twice for pairs of two policies, such as challenger "
        "and champion",
    )
    add.add_argument("--prompts", required=True, help="data set with prompts")
    add.add_argument("--labels", type=int, required=True, help="maximum number of pairs")
    add.add_argument(
        "--reward-model",
        default="",
        help="folder of a reward model with several members: takes the pairs on which they differ "
        "most (default: pairs at random)",
    )
    add.add_argument("--samples", type=int, default=4, help="answers of each policy to a prompt")
    add.add_argument(
        "--response-length",
        type=int,
        default=PPOConfig.response_length,
        help="maximum number of tokens of an answer",
    )
    add.add_argument(
        "--temperature", type=float, default=PPOConfig.temperature, help="sampling temperature"
    )
    add.add_argument("--seed", type=int, default=1, help="seed of the answers and of the choice")
    add.add_argument("--output", default="", help="file of the pairs (default: to-label.jsonl)")
    add.add_argument("--output-dir", default="outputs", help="folder whose cache has the models")


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))
