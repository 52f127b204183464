"""The entry point of `python -m ppo_core.supervised sft|reward`."""

import sys

from ppo_core.supervised.supervised_cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
