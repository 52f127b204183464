"""The entry point of `python -m ppo_core.supervised sft|reward`, which torchrun starts too."""

import sys

from ppo_core.distributed.process import end_with_parent, write_stacks_on_request
from ppo_core.errors.redacted_output import install_redaction
from ppo_core.supervised.supervised_cli import main

if __name__ == "__main__":
    install_redaction()
    end_with_parent()
    write_stacks_on_request()
    sys.exit(main(sys.argv[1:]))
