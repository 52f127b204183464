"""`python -m ppo_core`: what a shell, torchrun or `accelerate launch` starts."""

import sys
from collections.abc import Sequence

from ppo_core.config.argument_parser import parse_arguments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.distributed.interruption import EXIT_CODE
from ppo_core.distributed.large_imports import large_imports
from ppo_core.distributed.processes import end_with_parent, reported_errors
from ppo_core.errors import PPOError, RunInterruptedError


def main(argv: Sequence[str]) -> int:
    """Train as the flags say.

    Returns 0; 75 when SIGTERM came, and the run can go on from its checkpoint; or 1 when something
    is wrong, which is then said.
    """
    try:
        with reported_errors():
            arguments = parse_arguments([PPOConfig, ScriptArguments, ModelArguments], argv)
            # Only now: loading torch takes seconds, and a wrong flag is answered at once.
            with large_imports():
                from ppo_core.training.cli import train_ppo

            train_ppo(*arguments)
    except RunInterruptedError as error:
        print(f"ppo_core: {error}", file=sys.stderr)
        return EXIT_CODE
    except PPOError as error:
        print(f"ppo_core: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
