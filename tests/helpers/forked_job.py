"""Two processes as torchrun runs them, forked from one that has imported everything.

    python -m tests.helpers.forked_job '[PLAN, PLAN, ...]' FLAGS

A job a plan, one after the other, each with all the flags; a line "ended: 0 -9" for each has the
exit codes of its processes. Beside torchrun it saves the seconds that the imports take.
"""

import json
import os
import signal
import socket
import sys
import time

from ppo_core.distributed.process import PARENT
from tests.helpers import dying_process

PATIENCE = 20.0
"""Seconds that the other process has to end after SIGTERM."""


def run_job(plan: str) -> list[int]:
    """Return the exit codes of the processes; negative ones are signals."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"DYING_PLAN": plan, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", PARENT: str(os.getpid())}
    running = {fork(rank): rank for rank in (0, 1)}
    codes = [0, 0]
    give_up = None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status and give_up is None:
                give_up = time.monotonic() + PATIENCE
                for other in running:
                    os.kill(other, signal.SIGTERM)
        elif give_up is not None and time.monotonic() > give_up:
            for other in running:
                os.kill(other, signal.SIGKILL)
            give_up = None
        else:
            time.sleep(0.02)
    return codes


def fork(rank: int) -> int:
    """Fork a process, which never returns from here; return its id in the parent."""
    if pid := os.fork():
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    dying_process.main()
    sys.exit()


if __name__ == "__main__":
    plans = json.loads(sys.argv.pop(1))
    for each in plans:
        print("ended:", *run_job(json.dumps(each)), flush=True)
