"""`python -m ppo_core.supervised sft|reward ...`."""

import sys

from ppo_core.supervised.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
