"""`python -m ppo_core`: what a shell, torchrun or `accelerate launch` starts."""

import sys
from collections.abc import Sequence

from ppo_core.cli_arguments import ModelArguments, ScriptArguments
from ppo_core.config import PPOConfig
from ppo_core.errors import PPOError
from ppo_core.hf_arguments import parse_arguments


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; returns 0, or 1 when something is wrong, which is then said."""
    try:
        arguments = parse_arguments([PPOConfig, ScriptArguments, ModelArguments], argv)
        # Only now: loading torch takes seconds, and a wrong flag is answered at once.
        from ppo_core.cli import train

        train(*arguments)
    except PPOError as error:
        print(f"ppo_core: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
