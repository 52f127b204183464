"""`python -m ppo_core`: the command that a shell, torchrun or `accelerate launch` starts."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from ppo_core.config.argument_parser import parse_arguments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.distributed.choose_sharding import SHARD_WEIGHTS
from ppo_core.distributed.interruption import EXIT_CODE
from ppo_core.distributed.process import large_imports, prepare_command, reported_errors
from ppo_core.errors import PPOError, RunInterruptedError
from ppo_core.io.atomic_files import explained_full_disk
from ppo_core.models.kernels.cpu_memory import prepare_cpu_process

if TYPE_CHECKING:
    # `ppo_core.training.load_rewards` imports torch.
    from ppo_core.training.load_rewards import LoadLanguageModel


def main(argv: Sequence[str], load_language_model: "LoadLanguageModel | None" = None) -> int:
    """Train with the settings given as flags; return the exit code.

    The exit code is 0 on success, 1 after an error, which is printed, and 75 after SIGTERM. A run
    that saves checkpoints can resume after SIGTERM. `load_language_model` loads rewards that are
    language models; if None, these rewards are refused.
    """
    try:
        with reported_errors(), explained_full_disk():
            config, script, model = parse_arguments(
                [PPOConfig, ScriptArguments, ModelArguments], argv
            )
            # The import of torch takes seconds, so a wrong flag was reported before it.
            with large_imports():
                import torch

                from ppo_core.training.cli import train_ppo

            if config.use_cpu or not torch.cuda.is_available():
                prepare_cpu_process(shards_weights=config.sharding in SHARD_WEIGHTS)
            train_ppo(config, script, model, load_language_model)
    except RunInterruptedError as error:
        print(f"ppo_core: {error}", file=sys.stderr)
        return EXIT_CODE
    except PPOError as error:
        print(f"ppo_core: {error}", file=sys.stderr)
        return 1
    return 0


def run_process(load_language_model: "LoadLanguageModel | None" = None) -> NoReturn:
    """Prepare this process, train as `main` does, and exit."""
    prepare_command()
    sys.exit(main(sys.argv[1:], load_language_model))


if __name__ == "__main__":
    run_process()
