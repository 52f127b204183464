"""Run a command of the project from any folder.

`python -m flows rlhf run` does the same as `python flows/rlhf.py run` in the folder of the project.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

COMMANDS = ("deploy", "feedback", "registry", "retrain", "rlhf", "win_rate")


def main(argv: Sequence[str]) -> None:
    """Replace this process by the command that the first word names; pass it the other words."""
    if not argv or argv[0] not in COMMANDS:
        print(
            f"usage: python -m flows COMMAND ...\n"
            f"The commands are {', '.join(COMMANDS)}. Settings for real models are in "
            f"{FOLDER / 'presets'}.",
            file=sys.stderr,
        )
        sys.exit(2)
    # Python must be started with the command's own file: Metaflow packages the folder of that file.
    file = str(FOLDER / f"{argv[0]}.py")
    os.execv(sys.executable, [sys.executable, file, *argv[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
