"""A training process on a spot instance that AWS takes while the process is in a given phase.

    python -m tests.helpers.jobs.noticed_training PHASE NOTICE MODULE JOB

The process writes the notice in the place of Metaflow, and stays in the phase until the launcher
has seen the notice and sent SIGTERM. Then it trains on as `python -m MODULE JOB` does.
"""

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_core.checkpointing import write_checkpoint
from ppo_core.distributed.deepspeed_engine import DeepSpeedEngine
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.interruption import Interruption
from ppo_core.ppo.policy_sampler import PolicySampler

CALLS = {"rollout": 6, "update": 10, "save": 7, "SFT": 5}
"""Number of the call of each phase's function that the notice comes in.

Rollouts have two batches of prompts, updates four optimizer steps, and checkpoints several files.
"""

LONGEST_WAIT = 60.0
"""Maximum wait in seconds for SIGTERM."""


class Taken:
    """Counts the calls of a phase, and lets the notice come in one of them."""

    def __init__(self, phase: str, notice: Path) -> None:
        self._phase, self._notice = phase, notice
        self._calls = 0
        self._told = False

    def tell(self) -> None:
        """Note that SIGTERM arrived."""
        self._told = True

    def reach(self) -> None:
        """Count a call."""
        self._calls += 1
        if self._calls == CALLS[self._phase]:
            self._notice.write_text("")
            end = time.monotonic() + LONGEST_WAIT
            while not self._told:
                assert time.monotonic() < end, "the launcher sent no SIGTERM"
                time.sleep(0.01)
            print(f"SIGTERM arrived during {self._phase}", flush=True)


def before(action: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the action before each call."""

    def both(*values: Any, **named: Any) -> Any:
        action()
        return function(*values, **named)

    return both


def prepare(phase: str, notice: Path) -> None:
    """Let the notice come in the phase."""
    taken = Taken(phase, notice)
    Interruption._request = before(taken.tell, Interruption._request)
    match phase:
        case "rollout":
            sample = PolicySampler.sample
            # `pause` is called before each batch of prompts.
            PolicySampler.sample = lambda self, batch, pause: sample(
                self, batch, before(taken.reach, pause)
            )
        case "save":
            write_checkpoint.sync_to_disk = before(taken.reach, write_checkpoint.sync_to_disk)
        case "update" | "SFT":
            for kind in (Engine, DeepSpeedEngine):
                kind.step = before(taken.reach, kind.step)


if __name__ == "__main__":
    chosen, place, module, job = sys.argv[1:]
    if not Path(place).exists():
        prepare(chosen, Path(place))
    sys.argv = [module, job]
    runpy.run_module(module, run_name="__main__")
