"""`python -m ppo_core`, killed by SIGKILL at a moment that is chosen beforehand.

The moment is an event of Python's profiler inside a phase, a call or a return in the code of
ppo_core: "the 812th event of the update". A run has the same events each time, so a moment can be
reproduced. A process that is not killed saves its numbers of events. Modules that the run imports
later are imported here, since the profiler would slow their import down.
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
"""The phase that a function in a file of ppo_core begins and ends."""

NAMES = {name for _, name in PHASES}


class Profiler:
    """Counts the events of each phase, in any thread, and calls `die` at one of them."""

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
    """Kill this process after `delay` seconds; with `everyone`, all processes of the job."""
    doomed = psutil.Process().parent().children() if everyone else [psutil.Process()]
    if delay and os.fork():
        return  # the child kills this process, whatever it is doing then
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
