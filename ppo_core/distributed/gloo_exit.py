"""The last moment of a process that has talked to others over gloo.

gloo's threads let go of a finished operation's tensors a moment after the main thread has learned
that it is finished, and need Python's lock for that. Python before 3.14 ends a thread that waits
for the lock while the interpreter shuts down; this one is in C++ code that cannot be left so, and
the process aborts when all its work is done: "terminate called without an active exception"
(pytorch/pytorch#190489). A busy machine makes it likely. `destroy_process_group` waits for these
threads only where nothing, not even a model, knows the group any more.
"""

import atexit
import time

_TIME_FOR_THREADS = 0.1
"""Seconds. A thread that waits for the lock needs microseconds of it, once it has a core."""


def let_gloo_finish_at_exit() -> None:
    """Have this process leave Python's lock to its other threads just before it ends."""
    atexit.unregister(_leave_the_lock)
    atexit.register(_leave_the_lock)


def _leave_the_lock() -> None:
    time.sleep(_TIME_FOR_THREADS)
