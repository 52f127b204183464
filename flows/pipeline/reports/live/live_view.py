"""Show a training on the page of the run and on the card of the step, while it runs."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.inputs.flow_run import PAGE, FlowRun
from pipeline.reports.document import Document, ShownProgress
from pipeline.reports.live.followed_phase import (
    FollowedPhase,
    as_clock,
    describe_speed,
    plural,
)
from pipeline.reports.live.live_card import LiveCard
from pipeline.reports.run_page.facts import RunFacts, curves_of
from pipeline.reports.run_page.ppo_so_far import with_ppo_so_far
from pipeline.reports.run_page.run_report import REFRESH_SECONDS, run_report
from pipeline.reports.run_page.write_page import PAGE_FILE, write_page_file
from pipeline.settings.settings import Settings
from pipeline.tracking.tracker import Tracker
from ppo_core.io.progress_bar import PROGRESS

REST = 100
"""Minimum time between two pages, as a multiple of the CPU time for a page."""

LOOK_SECONDS = 1.0
"""Seconds between two readings of the progress file, from which the rate is estimated."""

FIRST_SECONDS = 5.0
"""Seconds before the first page and card; a shorter training is shown only at its end."""

PROGRESS_FILE = "phase.json"
"""Name of the file with the current phase in the folder of a run, if PROGRESS is not set."""


class LiveView:
    """Shows a training of a run on a page on this machine and on the Metaflow card of the step."""

    def __init__(self, run: FlowRun, settings: Settings, tracker: Tracker, card: LiveCard) -> None:
        """Show the tracked step of a run: the curves in the journal, and its current phase."""
        self._run, self._settings, self._card = run, settings, card
        self._step, self._journal = tracker.name, tracker.journal
        self._phase: FollowedPhase | None = None
        self._next, self._has_warned = time.monotonic() + FIRST_SECONDS, False
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show the training until the context ends, and keep its last state as the card's content.

        A thread reads and shows the training, so that an error in showing does not end the step.
        """
        before = os.environ.get(PROGRESS, "")
        file = Path(before or self._run.folder / PROGRESS_FILE)
        self._phase = FollowedPhase(file)
        os.environ[PROGRESS] = str(file)
        thread = threading.Thread(target=self._watch, name="live view", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            if not before:
                del os.environ[PROGRESS]

    def _watch(self) -> None:
        is_done = False
        try:
            while not self._over.wait(LOOK_SECONDS):
                self.update()
            document = run_report(self._facts(None))
            self._card.keep(document)
            self._write_page(document)
            is_done = True
        finally:
            if not is_done:
                self._warn("the log of the step has the error.")

    def update(self) -> None:
        """Read the phase; write page and card, unless they were written a short time ago."""
        assert self._phase is not None  # begun by `watching`
        phase, worked_before = self._phase.read(), time.thread_time()
        if time.monotonic() < self._next:
            return
        progress = None
        if phase is not None and phase.total:
            left = phase.time_remaining
            unit = plural(phase.fields["unit"])
            counted = f"{phase.completed:,.0f} of {phase.total:,.0f} {unit}"
            wait = "time left unknown" if left is None else f"{as_clock(left)} left"
            parts = [counted, *describe_speed(phase), wait, phase.fields["notes"]]
            details = ", ".join(filter(None, parts))
            progress = ShownProgress(
                phase=phase.description, done=phase.completed, total=phase.total, details=details
            )
        facts = self._facts(progress)
        if progress is None and not facts.curves:
            return
        document = run_report(facts)
        self._write_page(document)
        try:
            self._card.show(document)
        except OSError as error:
            self._warn(str(error))
        rest = REST * (time.thread_time() - worked_before)
        self._next = time.monotonic() + max(REFRESH_SECONDS, rest)

    def _write_page(self, document: Document) -> None:
        if self._run.workspace.store:
            return
        is_first = not (self._run.folder / PAGE_FILE).exists()
        if error := write_page_file(document, self._run.folder):
            self._warn(str(error))
        elif is_first:
            print(f"{PAGE} {self._run.place_of(PAGE_FILE)}, updated until the run ends", flush=True)

    def _warn(self, problem: str) -> None:
        """Print, only once, why the page or the card is out of date."""
        if not self._has_warned:
            self._has_warned = True
            print(f"Warning: The training is not shown while it runs: {problem}", flush=True)

    def _facts(self, progress: ShownProgress | None) -> RunFacts:
        curves = curves_of(self._run, self._journal)
        facts = RunFacts(run=self._run, settings=self._settings, curves=curves, progress=progress)
        return with_ppo_so_far(facts, self._warn) if self._step == "train_policy" else facts
