"""Run a command of the project from any folder: `rlhf COMMAND`, or `python -m flows COMMAND`.

`rlhf registry show NAME` does the same as `python flows/registry.py show NAME` in the folder of the
project. This module imports only the standard library, so that the help appears at once.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

COMMANDS = {
    "Train": {
        "run": ("rlhf run", "train, judge and register a policy: run [SETTINGS.toml] [options]"),
        "check": (
            "rlhf run --check",
            "check all inputs and print the sizes of a run; start no run",
        ),
        "resume": ("rlhf resume", "continue the last run, or the run --origin-run-id"),
        "card": ("rlhf card", "show the card of a step, also while it runs: card view STEP"),
        "logs": ("rlhf logs", "print everything that a step has printed: logs RUN/STEP"),
    },
    "Look": {
        "runs": ("runs", "list all runs, or compare two of them"),
        "registry": ("registry", "show, undo or overrule which version is champion"),
    },
    "Judge": {
        "win-rate": ("win_rate", "measure the win rate of any model"),
        "feedback": ("feedback", "label answers, and make data of what users say"),
    },
    "Production": {
        "deploy": ("deploy", "deploy the flows to Argo Workflows or Step Functions"),
        "retrain": ("retrain", "start a run if its inputs changed"),
    },
}
"""Group -> command -> (the command's file and first arguments, the command's help text)."""

FILES = ("deploy", "feedback", "registry", "retrain", "rlhf", "runs", "win_rate")
"""Files whose names are also commands, as in `python -m flows rlhf run`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process with the command that the first argument names.

    All other arguments are passed to the command.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    commands = {name: words for group in COMMANDS.values() for name, (words, _) in group.items()}
    if name in ("-h", "--help"):
        print(describe_commands())
        sys.exit(0)
    if name not in {*commands, *FILES}:
        wrong = f"{name!r:.100} is not a command.\n\n" if name else ""
        print(f"{wrong}{describe_commands()}", file=sys.stderr)
        sys.exit(2)
    file, *words = commands.get(name, name).split()
    if name in ("run", "check") and rest and rest[0].endswith(".toml"):
        # Metaflow expects `--config` before its own command.
        words, rest = ["--config", "settings", rest[0], *words], rest[1:]
    # Python must be started with the command's own file: Metaflow packages the folder of that file.
    path = str(FOLDER / f"{file}.py")
    os.execv(sys.executable, [sys.executable, path, *words, *rest])


def describe_commands() -> str:
    """Return the usage, with all commands in their groups."""
    lines = ["usage: rlhf COMMAND ...", ""]
    for title, group in COMMANDS.items():
        lines += [f"{title}:", *(f"  {name:<9} {does}" for name, (_, does) in group.items()), ""]
    return "\n".join(
        [
            *lines,
            "`rlhf COMMAND --help` prints the options of a command.",
            f"Settings for real models are in {FOLDER / 'presets'}.",
        ]
    )


if __name__ == "__main__":
    main()
