"""The entry point of `python -m ppo_core.supervised sft|reward`, which torchrun starts too."""

import sys

from ppo_core.distributed.process import prepare_command
from ppo_core.supervised.supervised_cli import main

if __name__ == "__main__":
    prepare_command()
    sys.exit(main(sys.argv[1:]))
