"""Limit the time of a call, even if the called library has no timeout or retries for minutes."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")

ANSWER_SECONDS = 30.0
"""Default limit for one answer of a registry or a store."""


def answer_within(seconds: float, call: Callable[..., Answer], *given: Any) -> Answer:
    """Return the result of `call(*given)`, or raise its error.

    The call runs in a daemon thread. If the call takes too long, the thread is abandoned, and the
    process can still end. Without this limit, a server that sends a byte now and then would block
    the caller forever.

    Raises:
        TimeoutError: the call has not ended after `seconds`.
    """
    outcome: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call(*given))
        # Any error of the call is raised again below, in the thread of the caller.
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="answer", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"no complete answer within {seconds:g} seconds")
    return outcome[0]
