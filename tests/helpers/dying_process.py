"""`python -m ppo_core` as it is, which dies by SIGKILL at a moment that is chosen beforehand.

The moment is an event of Python's profiler inside a phase, a call or a return in the code of
ppo_core: "the 812th event of the update". The same run has the same events each time, so a moment
can be come back to. A process that lives on leaves the numbers of its events. What the run
imports later is imported here, as the profiler would slow it down.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import deepspeed  # noqa: F401  transformers needs it to save a model
import psutil

import ppo_core.training.cli  # noqa: F401
from tests.helpers.paths import ROOT

PACKAGE = str(ROOT / "ppo_core")
PHASES = {
    ("trainer.py", "_sample"): "rollout",
    ("trainer.py", "_score"): "scoring",
    ("update.py", "update_policy"): "update",
    ("checkpointer.py", "save"): "save",
    ("files.py", "save_checkpoint"): "save",
}
"""The phase that lasts as long as a function of a file of ppo_core."""

NAMES = {name for _, name in PHASES}


class Profiler:
    """Counts the events of each phase, in whatever thread it runs, and dies at one of them."""

    def __init__(self, last: tuple[str, int] | None, die: Callable[[], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._last, self._die = last, die
        self._thread = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        outermost = getattr(self._thread, "outermost", None)
        if outermost is None:
            code = frame.f_code
            if event != "call" or code.co_name not in NAMES:
                return
            phase = PHASES.get((Path(code.co_filename).name, code.co_name))
            if phase is None:
                return
            self._thread.outermost, self._thread.phase = frame, phase
        elif frame is outermost and event == "return":
            self._thread.outermost = None
        if frame.f_code.co_filename.startswith(PACKAGE):
            phase = self._thread.phase
            self.counts[phase] += 1
            if (phase, self.counts[phase]) == self._last:
                self._die()


def die(*, everyone: bool, delay: float) -> None:
    """Kill this process `delay` seconds from now, and with `everyone` the others of the job."""
    doomed = psutil.Process().parent().children() if everyone else [psutil.Process()]
    if delay and os.fork():
        return  # the child kills, wherever this process is by then
    time.sleep(delay)
    for process in doomed:
        if process.pid != os.getpid():
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    plan = json.loads(os.environ["DYING_PLAN"])
    rank, moment = int(os.environ["RANK"]), plan["moment"]
    last = None
    if moment is not None and moment["rank"] == rank:
        last = moment["phase"], moment["event"]
    profiler = Profiler(last, lambda: die(everyone=moment["everyone"], delay=moment["delay"]))
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        runpy.run_module("ppo_core", run_name="__main__", alter_sys=True)
    finally:
        sys.setprofile(None)
        Path(plan["counts"], f"{rank}.json").write_text(json.dumps(profiler.counts))


if __name__ == "__main__":
    main()
