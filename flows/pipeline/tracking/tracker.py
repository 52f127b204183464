"""Track a step in MLflow, whether MLflow answers or not."""

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
"""Name of the run that is the parent of the runs of the steps."""

FLUSH_SECONDS = 20.0
"""Maximum wait at the end of a step until all entries are sent."""

FAILED_SECONDS = 60.0
"""Maximum wait at the end of a failed step, which may be the last one and sends all entries."""

SHORT_SECONDS = 30.0
"""A shorter step may leave its entries to the next step, because importing MLflow would dominate
its time."""

REQUIRED_SECONDS = 180.0
"""Maximum wait where the step cannot continue without MLflow."""


class Tracker:
    """Tracks a step while its context lasts: its status, its machine and its entries.

        with Tracker(folder, runs, "train_policy") as tracker:
            tracker.step.log_metrics({"loss": 0.1}, step=1)
            tracker.parent.log_metrics({"win_rate": 0.6})

    Entries go to the journal in `folder`, and a thread sends them. Entries left at the end of a
    step are sent by the next step with the same folder.
    """

    def __init__(
        self, folder: Path, runs: Mapping[str, str], step: str, *, patience: float = 0.0
    ) -> None:
        """Track a step.

        Args:
            folder: folder of the journal of all steps of the run.
            runs: ids of the MLflow runs, from `start_runs`.
            step: name of the step, or PARENT for the last step, whose end ends the full run.
            patience: seconds before MLflow is imported. A step that succeeds within them sends
                nothing; a step that fails sends everything. Neither samples its machine.
        """
        self.journal = Journal(folder)
        self.parent = RunLog(self.journal, runs[PARENT])
        """The run of the whole flow."""
        self.step = RunLog(self.journal, runs[step])
        """The run of this step."""
        self._sender = Sender(self.journal, patience=patience)
        # The steps sample the machine; the parent does not.
        self._system = SystemMetrics(self.step, patience=patience) if step != PARENT else None
        self._started = 0.0

    def __enter__(self) -> Self:
        """Start to track the step."""
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
        """End the step; wait a limited time for the remaining entries to be sent."""
        if self._system:
            self._system.stop()
        if self.step.run != self.parent.run:
            # MLflow counts from the creation of the run, which is the start of the flow.
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
        """Wait until all present entries are sent.

        Raises:
            ModelError: `seconds` have passed.
        """
        if not self._sender.flush(seconds):
            raise ModelError(
                f"{self._kept()} A version would be registered without its measurements. "
                "Start MLflow again, then continue with `python flows/rlhf.py resume`."
            )

    def _kept(self) -> str:
        trouble = self._sender.trouble or "no answer yet"
        return (
            f"MLflow has not accepted {len(self.journal.unsent())} tracked entries "
            f"({trouble}). They are stored in {self.journal.folder}."
        )
