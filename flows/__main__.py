"""Run a command of the project wherever it is installed.

`python -m flows rlhf run` is `python flows/rlhf.py run` with the file of the installed package.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

COMMANDS = ("deploy", "registry", "retrain", "rlhf", "win_rate")


def main(argv: Sequence[str]) -> None:
    """Become the command that the first word names, with the other words as its arguments."""
    if not argv or argv[0] not in COMMANDS:
        print(
            f"usage: python -m flows COMMAND ...\n"
            f"The commands are {', '.join(COMMANDS)}. Settings for real models are in "
            f"{FOLDER / 'presets'}.",
            file=sys.stderr,
        )
        sys.exit(2)
    # A new program: Metaflow packages the folder of the file that Python was started with.
    file = str(FOLDER / f"{argv[0]}.py")
    os.execv(sys.executable, [sys.executable, file, *argv[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
