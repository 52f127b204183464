"""Track a step in MLflow, even while MLflow does not answer."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.tracking.journal import Journal
from pipeline.tracking.run_log import RunLog
from pipeline.tracking.run_record import (
    ENDED_EARLY,
    OUTCOME,
    PARENT,
    RESUMED,
    RUNNING_AGAIN,
    RUNS_AGAIN,
    describe_failure,
    end_runs,
    record_processes,
    remove_record,
)
from pipeline.tracking.sender_thread import Sender
from pipeline.tracking.system_metrics import SystemMetrics
from ppo_core.errors import ModelError, PPOError

FLUSH_SECONDS = 20.0
"""Maximum wait in seconds at the end of a step until all entries are sent."""

FAILED_SECONDS = 60.0
"""Maximum wait in seconds at the end of a step that failed or refused the run. It is longer than
FLUSH_SECONDS, because perhaps no later step sends the entries."""

SHORT_SECONDS = 30.0
"""A step that takes fewer seconds may leave its entries to the next step, because the import of
MLflow would take most of the time."""

REQUIRED_SECONDS = 180.0
"""Maximum wait in seconds if a step cannot continue without MLflow."""


class Tracker:
    """Context manager that tracks a step: status, load of the machine, and logged entries.

        with Tracker(folder, runs, "train_policy") as tracker:
            tracker.step.log_metrics({"loss": 0.1}, step=1)
            tracker.parent.log_metrics({"win_rate": 0.6})

    Entries are written to the journal in `folder`, and a thread sends them. If entries are left at
    the end of a step, the next step with the same folder sends them.
    """

    def __init__(
        self, folder: Path, runs: Mapping[str, str], step: str, *, patience: float = 0.0
    ) -> None:
        """Track a step.

        Args:
            folder: folder of the journal of all steps of the run.
            runs: ids of the MLflow runs, from `start_runs`, in the order of the steps.
            step: name of the step; PARENT for the last step, which also ends the full run.
            patience: seconds before MLflow is imported. A step that ends earlier samples no load;
                it sends nothing if it succeeds, and all entries if it fails.
        """
        self.journal = Journal(folder)
        self.parent = RunLog(self.journal, runs[PARENT])
        """Log of the parent run."""
        self.step = RunLog(self.journal, runs[step])
        """Log of the run of this step."""
        self._sender = Sender(self.journal, patience=patience)
        # Only the runs of steps have system metrics; the parent run has none.
        self._system = SystemMetrics(self.step, patience=patience) if step != PARENT else None
        self._runs, self.name = runs, step
        self._started = 0.0
        self._refusal: tuple[str, Sequence[str]] | None = None

    def __enter__(self) -> Self:
        """Start tracking the step."""
        self._started = time.perf_counter()
        record_processes(self.journal.folder)
        for log in (self.parent, self.step):
            log.set_status("RUNNING")
            if self.journal.tag(log.run, ENDED_EARLY) is not None:
                log.set_tags({ENDED_EARLY: RESUMED})
        if self.journal.tag(self.parent.run, OUTCOME) is not None:
            self.parent.set_tags({OUTCOME: RUNS_AGAIN})
            self.parent.describe(RUNNING_AGAIN)
        self._sender.start()
        if self._system:
            self._system.start()
        return self

    def refuse(self, what: str, reasons: Sequence[str]) -> None:
        """Make this step the last step of the run, because the run is refused.

        The step itself counts as finished. At the step's end, all unfinished MLflow runs are ended.

        Args:
            what: sentence that names the refused result.
            reasons: reasons for the refusal, as sentences.
        """
        self._refusal = what, reasons

    def __exit__(
        self,
        error: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the step, and wait a limited time until the remaining entries are sent.

        If the step failed, all unfinished MLflow runs are ended.
        """
        if self._system:
            self._system.stop()
        try:
            self._end_step(value)
        except PPOError as also:
            if value is None:
                raise
            # The step's own error is raised. This second error follows from it or from a full disk.
            print(f"Warning: The end of the step is not tracked: {also}", flush=True)
        finally:
            self._sender.stop()

    def _end_step(self, error: BaseException | None) -> None:
        if self.step.run != self.parent.run:
            # MLflow's own duration starts when the run is created, at the start of the flow.
            self.step.log_metrics({"seconds": time.perf_counter() - self._started})
        if error is None:
            self.step.set_status("FINISHED")
        else:
            reason = describe_failure(self.name, error)
            end_runs(self.journal, self._not_finished(), "failed", reason)
        if error is None and self._refusal is not None:
            what, reasons = self._refusal
            end_runs(self.journal, self._not_finished(), "refused", what, reasons)
        is_last = error is not None or self._refusal is not None
        left_to_the_next = not is_last and not self._sender.sends
        seconds = FAILED_SECONDS if is_last else FLUSH_SECONDS
        if not left_to_the_next and not self._sender.flush(seconds):
            print(
                f"Warning: {self._kept()} The next step or the next run on this machine sends "
                "them.",
                flush=True,
            )
        elif is_last or self.name == PARENT:
            remove_record(self.journal.folder)

    def _not_finished(self) -> dict[str, str]:
        """Return the ids of the parent run, and of the runs of this step and the later steps."""
        names = [name for name in self._runs if name != PARENT]
        later = [] if self.name == PARENT else names[names.index(self.name) :]
        return {name: self._runs[name] for name in [PARENT, *later]}

    def require_all_sent(self, seconds: float = REQUIRED_SECONDS) -> None:
        """Wait until all entries written before this call are sent.

        Raises:
            ModelError: entries are left after `seconds`.
        """
        if not self._sender.flush(seconds):
            raise ModelError(
                f"{self._kept()} Continuing would leave measurements out of MLflow. "
                "Start MLflow again, then continue with `python flows/rlhf.py resume`."
            )

    def _kept(self) -> str:
        trouble = self._sender.trouble or "no answer yet"
        return (
            f"MLflow has not accepted {len(self.journal.unsent())} tracked entries "
            f"({trouble}). They are stored in {self.journal.folder}."
        )
