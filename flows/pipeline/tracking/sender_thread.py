"""Send the entries of a journal to MLflow in a thread; retry while MLflow does not answer."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying
from tenacity.nap import sleep_using_event
from tenacity.stop import stop_when_event_set
from tenacity.wait import wait_exponential

from pipeline.tracking.journal import IMPORTING_MLFLOW, SPOILT, Entry, Journal
from ppo_core.errors import PPOError
from ppo_core.errors.redaction import redact

JOURNAL_POLL_SECONDS = 1.0
"""Seconds between two reads of the journal; one call sends all entries that came meanwhile."""

MAX_WAIT_SECONDS = 10.0
"""Maximum seconds between two attempts while MLflow does not answer."""

ENTRIES_AT_A_TIME = 1000

MAX_TROUBLE_CHARACTERS = 240

Answer = TypeVar("Answer")


class Sender:
    """Sends existing and new entries of a journal from `start` until `stop`.

    While MLflow does not answer, the thread retries. It prints a line when MLflow stops answering
    and a line when MLflow answers again. An entry that MLflow will never accept would block all
    later entries, so it is printed and moved to `journal.refused`.
    """

    def __init__(self, journal: Journal, *, patience: float = 0.0) -> None:
        """Prepare to send entries of `journal`.

        Sending begins `patience` seconds after `start`, or at the first `flush` if that is earlier.
        """
        self.trouble = ""
        """Error of the last attempt; empty while MLflow answers."""
        self.sends = patience == 0
        """Whether sending has begun, after `patience` seconds or by `flush`."""
        self._journal = journal
        self._patience = patience
        self._refused: set[tuple[str, ...]] = set()
        self._stopping = threading.Event()
        self._awake = threading.Event()
        # A daemon thread, so that the process can end while a server hangs.
        self._thread = threading.Thread(target=self._run, name="mlflow-sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def flush(self, seconds: float) -> bool:
        """Wait until all entries written before this call are sent.

        Return False if this takes more than `seconds`, or if the thread has ended. Sending begins
        at once, even if `patience` seconds have not passed.
        """
        end, deadline = self._journal.end(), time.monotonic() + seconds
        while self._journal.sent() < end:
            if time.monotonic() > deadline or not self._thread.is_alive():
                return False
            self._awake.set()
            time.sleep(0.02)
        return True

    def stop(self) -> None:
        """Stop sending; wait at most one second for a call that hangs."""
        self._stopping.set()
        self._awake.set()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        self._awake.wait(self._patience)
        if self._stopping.is_set():
            return
        self.sends = True
        # Imported in this thread, so that no step waits for this slow import.
        with IMPORTING_MLFLOW:
            from pipeline.tracking.mlflow_client import connect

        # Keep urllib3 from logging every attempt: this class prints when failures begin and end.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        client = self._try_until_it_answers(connect)
        try:
            while not self._stopping.is_set():
                with self._journal.sending() as alone:
                    while alone and not self._stopping.is_set() and self._send_some(client):
                        pass
                self._awake.wait(JOURNAL_POLL_SECONDS)
                self._awake.clear()
        except PPOError as error:  # the disk of the journal is full
            self.trouble = str(error)
            print(f"Warning: Nothing more is sent to MLflow. {error}", flush=True)

    def _send_some(self, client: Any) -> bool:
        """Send the next entries; return False if no entries are left or the thread is stopped."""
        from pipeline.tracking.send_to_mlflow import deliver, in_calls

        waiting = self._journal.unsent(ENTRIES_AT_A_TIME)
        for call in in_calls(waiting):
            entries = [entry for entry, _ in call]
            refused = self._try_until_it_answers(deliver, client, entries)
            if refused is None:
                return False
            for entry, reason in refused:
                self._set_aside(entry, reason)
            self._journal.mark_sent(call[-1][1])
        return bool(waiting)

    def _try_until_it_answers(self, call: Callable[..., Answer], *given: Any) -> Answer | None:
        """Repeat a call until it succeeds; return None if the thread is stopped first.

        Every error counts as temporary, because each artifact store has its own error classes.
        """
        answer = Retrying(
            wait=wait_exponential(multiplier=0.5, max=MAX_WAIT_SECONDS),
            stop=stop_when_event_set(self._stopping),
            sleep=sleep_using_event(self._stopping),
            before_sleep=self._note_trouble,
            retry_error_callback=lambda _: None,
        )(call, *given)
        if self.trouble and answer is not None:
            self.trouble = ""
            print("Warning: MLflow answers again; the stored entries are being sent.", flush=True)
        return answer

    def _note_trouble(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        # MLflow and its HTTP client wrap the cause several times.
        while error is not None and (cause := error.__cause__ or error.__context__):
            error = cause
        first = not self.trouble
        # Errors of MLflow contain addresses with credentials, and multi-line web pages of gateways.
        message = redact(f"{type(error).__name__}: {error}")
        self.trouble = " ".join(message.split())[:MAX_TROUBLE_CHARACTERS]
        if first:
            print(
                f"Warning: MLflow does not accept tracked entries ({self.trouble}). The step "
                f"continues; they are stored in {self._journal.folder} and sent when MLflow "
                "answers.",
                flush=True,
            )

    def _set_aside(self, entry: Entry, reason: str) -> None:
        reason = redact(reason)
        self._journal.refuse(entry, reason)
        what = [str(entry[key]) for key in ("key", "path", "status") if key in entry]
        names = what or list(entry.get("values", ()))
        kind = (entry["kind"], *names)
        if kind not in self._refused:
            self._refused.add(kind)
            print(
                f"Warning: {_named(entry, names)} cannot be sent to MLflow: {reason}. This entry, "
                "and later entries with the same names that cannot be sent, are stored in "
                f"{self._journal.refused}.",
                flush=True,
            )


def _named(entry: Entry, names: Sequence[str]) -> str:
    if entry["kind"] == SPOILT:
        return "A damaged line of the journal"
    return f"{entry['kind']} {', '.join(names)} of run {entry['run']}"
