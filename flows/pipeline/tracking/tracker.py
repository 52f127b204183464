"""What a step does is tracked in MLflow, whether MLflow answers or not."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.tracking.journal import Journal
from pipeline.tracking.run_log import RunLog
from pipeline.tracking.sender import Sender
from pipeline.tracking.system_metrics import SystemMetrics
from ppo_core.errors import ModelError

PARENT = "parent"
"""Name of the run above those of the steps."""

FLUSH_SECONDS = 20.0
"""How long the end of a step waits for MLflow to take the rest."""

FAILED_SECONDS = 60.0
"""The same for a step that failed: no other may come, and it may have all of the others to send."""

SHORT_SECONDS = 30.0
"""A step that takes no longer may leave it to the next one to send what it tracked: importing
MLflow would take a good part of it."""

REQUIRED_SECONDS = 180.0
"""How long is waited for MLflow where the step cannot go on without it."""


class Tracker:
    """Tracks a step while its context lasts: its state, its machine, and what it logs.

        with Tracker(folder, runs, "train_policy") as tracker:
            tracker.step.log_metrics({"loss": 0.1}, step=1)
            tracker.parent.log_metrics({"win_rate": 0.6})

    All of it goes to the journal in `folder`; a thread sends it. What MLflow has not taken by the
    end of a step is sent by the next one with the same folder.
    """

    def __init__(
        self, folder: Path, runs: Mapping[str, str], step: str, *, patience: float = 0.0
    ) -> None:
        """Track a step.

        Args:
            folder: where the journal of all steps of the run is.
            runs: ids of the runs in MLflow, as `start_runs` gives them.
            step: name of the step, or PARENT for the last one: its end is that of the whole run.
            patience: seconds in which MLflow is not even imported. A step that has ended well by
                then sends nothing; one that fails sends all. Neither has a sample of its machine.
        """
        self.journal = Journal(folder)
        self.parent = RunLog(self.journal, runs[PARENT])
        """The run of the whole flow."""
        self.step = RunLog(self.journal, runs[step])
        """The run of this step."""
        self._sender = Sender(self.journal, patience=patience)
        # The parent has none of its own: its steps have them.
        self._system = SystemMetrics(self.step, patience=patience) if step != PARENT else None
        self._started = 0.0

    def __enter__(self) -> Self:
        """The step begins."""
        self._started = time.perf_counter()
        self.parent.set_status("RUNNING")
        self.step.set_status("RUNNING")
        self._sender.start()
        if self._system:
            self._system.start()
        return self

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The step has ended; it waits a little for MLflow to take the rest, if that was begun."""
        if self._system:
            self._system.stop()
        if self.step.run != self.parent.run:
            # MLflow counts from when a run was made, which was when the flow started.
            self.step.log_metrics({"seconds": time.perf_counter() - self._started})
        self.step.set_status("FINISHED" if error is None else "FAILED")
        if error is not None:
            self.parent.set_status("FAILED")
        left_to_the_next = error is None and not self._sender.sends
        seconds = FLUSH_SECONDS if error is None else FAILED_SECONDS
        if not left_to_the_next and not self._sender.flush(seconds):
            print(f"{self._kept()} The next step, or a resumed run, sends them.", flush=True)
        self._sender.stop()

    def require_all_sent(self, seconds: float = REQUIRED_SECONDS) -> None:
        """Wait until MLflow has taken everything so far.

        Raises:
            ModelError: it has not within that time.
        """
        if not self._sender.flush(seconds):
            raise ModelError(
                f"{self._kept()} A version would be registered without what it was measured by. "
                "Start MLflow again, then go on with `python flows/rlhf.py resume`."
            )

    def _kept(self) -> str:
        trouble = self._sender.trouble or "no answer yet"
        return (
            f"MLflow has not taken {len(self.journal.unsent())} entries of what was tracked "
            f"({trouble}). They are kept in {self.journal.folder}."
        )
