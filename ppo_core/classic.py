"""TRL 0.11's loop: the public names of `ppo_core.trl.classic`, which describes it."""

from ppo_core.trl.classic import *  # noqa: F403
from ppo_core.trl.classic import __all__ as __all__
