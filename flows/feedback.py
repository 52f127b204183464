"""Collect what users say about served answers; choose pairs of answers and let people label them.

    python flows/feedback.py collect NAME [--votes FILE] [--output-dir outputs/feedback]
    python flows/feedback.py choose outputs/runs/RUN --policy models:/NAME@challenger --labels 200
    python flows/feedback.py disputed outputs/runs/RUN --reward-model FOLDER --labels 50
    python flows/feedback.py label to-label.jsonl [--output labeled.jsonl]
    python flows/feedback.py to-label-studio to-label.jsonl
    python flows/feedback.py from-label-studio export.json

NAME is the registered model whose answers `docs/champion_service.py NAME --record` serves.
Each `collect` replaces feedback.jsonl and left-out.jsonl, so nothing is counted twice.
`python flows/rlhf.py run --set feedback=outputs/feedback/feedback.jsonl` trains on the feedback.
`choose` samples answers and writes pairs for people to label. `disputed` writes the pairs on which
the judge and the reward model prefer different answers. `label` serves a web page on this machine
and saves each label at once. `to-label-studio` writes the pairs as tasks of Label Studio, and
`from-label-studio` reads the labels that Label Studio exported.
"""

import argparse
import getpass
import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.settings.environment import run_and_exit
from ppo_core.config.field_checks import refuse_secrets
from ppo_core.errors import ConfigError, DataError, PPOError
from ppo_core.io.atomic_files import explained_full_disk, require_writable
from ppo_core.io.text_files import read_toml_file
from ppo_core.reporting.escaping import one_line

if TYPE_CHECKING:
    from pipeline.settings.settings import Settings


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
    from human_feedback.collect_feedback import collect, describe_feedback, write_feedback
    from human_feedback.read_opinions import read_votes
    from human_feedback.read_traces import FoundOpinions, Scale, read_traces
    from pipeline.tracking.mlflow_client import check_model_name

    check_model_name(given.name)
    if (given.liked_from is None) != (given.disliked_to is None):
        raise ConfigError("--liked-from and --disliked-to belong together. Give both, or neither.")
    if given.liked_from is not None and given.disliked_to >= given.liked_from:
        raise ConfigError(
            f"--disliked-to {given.disliked_to:g} must be below --liked-from {given.liked_from:g}: "
            "a score cannot be both."
        )
    if given.half_life is not None and not given.half_life > 0:
        raise ConfigError(f"--half-life {given.half_life:g} must be above 0 days.")
    if given.only_votes:
        _refuse_options_of_traces(given)
    found = FoundOpinions()
    if not given.only_votes:
        scale = Scale(liked=given.liked_from, disliked=given.disliked_to)
        found = read_traces(given.name, scale, experiment=given.experiment, since=given.since)
    for source in given.votes:
        opinions, left_out = read_votes(source, given.since)
        found.opinions += opinions
        found.left_out += left_out
    collected = collect(
        found.opinions, found.left_out, given.without_user, half_life_days=given.half_life
    )
    users = {one.user for one in found.opinions}
    for name in sorted({*given.without_user} - users):
        print(
            f"Warning: --without-user {shlex.quote(one_line(name))} leaves out nothing, because "
            f"none of the {len(users - {''})} known users has this name."
        )
    if not collected.opinions:
        raise DataError(
            f"There is no usable opinion on answers of '{given.name}': {len(collected.left_out)} "
            f"opinions were left out, and {found.silent} answers have no feedback. Nothing was "
            "written."
        )
    path = write_feedback(collected, Path(given.output_dir))
    print("\n".join(describe_feedback(collected, found.silent)))
    print(f"Written to {path}. To train on it: --set feedback={path}")


def _refuse_options_of_traces(given: argparse.Namespace) -> None:
    """Raise if an option is given that has no effect together with `--only-votes`."""
    for name in ("experiment", "liked_from", "disliked_to"):
        if (value := getattr(given, name)) not in ("", None):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} {value} has no effect with --only-votes, which reads no traces. Leave "
                f"out {option} or --only-votes."
            )


def _label(given: argparse.Namespace) -> None:
    from human_feedback.label_server import label_server
    from human_feedback.labeling import Labeling
    from human_feedback.read_opinions import read_pairs
    from pipeline.inputs.human_labels_to_pairs import votes_of

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
    print(f"\n{labeling.done} of {len(rows)} pairs are labeled or skipped. Labels are in {file}")


def _choose(given: argparse.Namespace) -> None:
    from human_feedback.choose_pairs import PairChoice, pairs_to_label, write_pairs

    output = _output(given.output, Path("to-label.jsonl"))
    chosen = {name: getattr(given, name) for name in _CHOICE}
    pairs = pairs_to_label(PairChoice(settings=_settings_of(given.run_folder), **chosen))
    write_pairs(pairs, output)
    how = "drawn at random"
    if given.reward_model:
        deviations = [pair.deviation for pair in pairs]
        how = (
            "on which the reward models differ most; standard deviation of P(first is better): "
            f"{max(deviations):.2f} to {min(deviations):.2f}"
        )
    why = "have equal answers or resemble these prompts, or the data set has no more prompts"
    _say_what_is_next(output, len(pairs), given.labels, how, why)


def _disputed(given: argparse.Namespace) -> None:
    from human_feedback.choose_pairs import disputed_pairs, write_pairs

    folder, output = Path(given.run_folder), _output(given.output, Path("disputed.jsonl"))
    settings = _settings_of(given.run_folder)
    pairs = disputed_pairs(settings, folder / "evaluation", given.reward_model, given.labels)
    write_pairs(pairs, output)
    how = "that judge and reward model order differently"
    why = "resemble these prompts, or judge and reward model order their answers alike"
    _say_what_is_next(output, len(pairs), given.labels, how, why)


def _settings_of(run_folder: str) -> "Settings":
    """Return the settings in a run's folder; fetch the inputs, as a run does."""
    from pipeline.inputs.flow_run import SETTINGS_FILE
    from pipeline.settings.make_settings import make_settings
    from pipeline.stages.start import find_inputs

    table = read_toml_file(Path(run_folder) / SETTINGS_FILE, ConfigError)
    return find_inputs(make_settings(table, {}))


def _say_what_is_next(output: Path, pairs: int, wanted: int, how: str, why: str) -> None:
    print(f"{output} has {pairs} pairs {how}.")
    if pairs < wanted:
        print(f"{wanted} pairs were asked for, but the other prompts {why}.")
    print(f"Next: python flows/feedback.py label {shlex.quote(str(output))}")


def _to_label_studio(given: argparse.Namespace) -> None:
    from human_feedback.label_studio import INTERFACE, write_tasks
    from human_feedback.read_opinions import read_pairs
    from pipeline.inputs.human_labels_to_pairs import votes_of

    output = _output(given.output, Path(given.pairs).with_name("label-studio.json"))
    pairs = votes_of(read_pairs(given.pairs))
    write_tasks(pairs, output)
    print(f"{output} has {len(pairs)} tasks. Import them into a project with this interface:")
    print(INTERFACE)
    print("Then export in the format JSON: python flows/feedback.py from-label-studio EXPORT")


def _from_label_studio(given: argparse.Namespace) -> None:
    from human_feedback.label_studio import labels_of_export
    from pipeline.inputs.json_lines import write_jsonl

    output = _output(given.output, Path(given.export).with_name("labeled-in-label-studio.jsonl"))
    rows = labels_of_export(Path(given.export))
    write_jsonl(output, rows)
    people = {row["annotator"] for row in rows} - {None}
    print(f"{output} has {len(rows)} labels of {len(people)} known persons.")


def _output(named: str, default: Path) -> Path:
    """Return the file to write.

    Raises:
        ConfigError: the file exists, or its folder is not writable.
    """
    output = Path(named) if named else default
    require_writable(output.parent, "output")
    if output.exists():
        raise ConfigError(
            f"{output} exists. It would be replaced, and labels in it would be lost. Name another "
            "file with --output."
        )
    return output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="feedback.py", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_collect(commands.add_parser("collect", help="read traces and votes, write training data"))
    _add_choose(commands.add_parser("choose", help="sample answers, choose pairs to label"))
    add = commands.add_parser(
        "disputed", help="write the pairs that judge and reward model order differently"
    )
    add.set_defaults(run=_disputed)
    add.add_argument("run_folder", metavar="RUN", help="folder of a run: outputs/runs/RUN")
    add.add_argument("--reward-model", required=True, help="folder of a reward model")
    add.add_argument("--labels", type=_count, required=True, help="maximum number of pairs")
    add.add_argument("--output", default="", help="file of the pairs (default: disputed.jsonl)")
    add = commands.add_parser("label", help="label pairs of answers on a page of this machine")
    add.set_defaults(run=_label)
    add.add_argument("pairs", help="rows with prompt, first and second, such as to-label.jsonl")
    add.add_argument("--output", default="", help="file of the labels (default: labeled.jsonl)")
    add.add_argument("--annotator", default="", help="id of the person (default: the user's name)")
    add.add_argument("--port", type=_port, default=0, help="port of the page (default: a free one)")
    add = commands.add_parser("to-label-studio", help="write pairs as tasks of Label Studio")
    add.set_defaults(run=_to_label_studio)
    add.add_argument("pairs", help="rows with prompt, first and second, such as to-label.jsonl")
    add.add_argument("--output", default="", help="file of the tasks (default: label-studio.json)")
    add = commands.add_parser("from-label-studio", help="read labels of a JSON export")
    add.set_defaults(run=_from_label_studio)
    add.add_argument("export", help="file that Label Studio exported in the format JSON")
    add.add_argument(
        "--output", default="", help="file of the labels (default: labeled-in-label-studio.jsonl)"
    )
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
        "--since",
        type=_time,
        help="use no answers and no votes from before this day or time",
    )
    add.add_argument("--liked-from", type=_score, help="scores from this on are positive judgments")
    add.add_argument("--disliked-to", type=_score, help="scores up to this are negative judgments")
    add.add_argument(
        "--half-life", type=float, help="days after which an opinion has half the weight"
    )
    add.add_argument(
        "--without-user", action="append", default=[], help="user to leave out; may be repeated"
    )
    add.add_argument("--output-dir", default="outputs/feedback", help="folder of the files")


_CHOICE = "policies labels reward_model prompts samples seed".split()
"""Arguments of `choose` that are fields of `PairChoice`."""


def _add_choose(add: argparse.ArgumentParser) -> None:
    add.set_defaults(run=_choose)
    add.add_argument("run_folder", metavar="RUN", help="folder of a run: outputs/runs/RUN")
    add.add_argument(
        "--policy",
        dest="policies",
        action="append",
        required=True,
        help="folder or models:/NAME@ALIAS; may be repeated, for challenger and champion",
    )
    add.add_argument("--labels", type=_count, required=True, help="maximum number of pairs")
    add.add_argument(
        "--reward-model",
        default="",
        help="folder of a reward model with several members: write the pairs on which they differ "
        "most (default: pairs at random)",
    )
    add.add_argument(
        "--prompts",
        action="append",
        default=[],
        help="data set with prompts; may be repeated (default: the prompts of the run)",
    )
    add.add_argument("--samples", type=_count, default=4, help="answers of a policy to a prompt")
    add.add_argument("--seed", type=int, default=1, help="seed of the answers and of the choice")
    add.add_argument("--output", default="", help="file of the pairs (default: to-label.jsonl)")


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text} must be between 0 and 65535")
    return int(text)


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least 1")
    return int(text)


def _score(text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number")
    return score


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a day or time in ISO 8601") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)


if __name__ == "__main__":
    run_and_exit(main)
