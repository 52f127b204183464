"""Public names of `ppo_core.trl.classic`, the training loop of TRL 0.11."""

from ppo_core.trl.classic import *  # noqa: F403
from ppo_core.trl.classic import __all__ as __all__
