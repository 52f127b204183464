"""Write the page of a run."""

import re
from pathlib import Path

from pipeline.inputs.flow_run import PAGE, FlowRun
from pipeline.reports.document import Document
from pipeline.reports.html_page import document_page
from pipeline.reports.run_page.facts import RunFacts, curves_of
from pipeline.reports.run_page.ppo_so_far import with_ppo_so_far
from pipeline.reports.run_page.run_report import run_report
from pipeline.settings.settings import Settings
from pipeline.tracking.journal import Journal
from pipeline.tracking.run_log import RunLog
from ppo_core.errors import PPOError
from ppo_core.io.atomic_files import explained_writes, write_atomically

RELOADS = re.compile('<meta http-equiv="refresh"')
"""Mark on the page of a run that has no outcome yet."""

PAGE_FILE = "index.html"
"""Name of the page in the folder of a run, and among the artifacts of its MLflow parent run."""


def write_run_page(facts: RunFacts, parent: RunLog) -> str:
    """Write the page of a run, log it, and return a sentence that says where it is."""
    error = write_page_file(run_report(facts), facts.run.folder)
    if error is not None:
        return f"The page of the run was not written: {error}"
    parent.log_artifact(facts.run.folder / PAGE_FILE)
    place = "" if facts.run.workspace.store else f"{facts.run.place_of(PAGE_FILE)}, and "
    return f"{PAGE} {place}{PAGE_FILE} of the run in MLflow"


def write_failure(run: FlowRun, settings: Settings, failure: str) -> None:
    """Say on the page of a run that a step failed, unless the page has the outcome of the run.

    Without a disk that all steps share, there is no such page. An error in writing the page is only
    printed, so that the step still raises its own error.
    """
    path = run.folder / PAGE_FILE
    if run.workspace.store or not path.is_file():
        return
    try:
        if not RELOADS.search(path.read_text(encoding="utf-8")):
            return
        curves = curves_of(run, Journal(run.folder))
        facts = RunFacts(run=run, settings=settings, curves=curves, failure=failure)
        facts = with_ppo_so_far(facts, lambda problem: print(f"Warning: {problem}", flush=True))
        if wrong := write_page_file(run_report(facts), run.folder):
            raise wrong
    except (PPOError, OSError, ValueError) as error:
        print(f"Warning: The page of the run does not show the failure: {error}", flush=True)


def write_page_file(document: Document, folder: Path) -> PPOError | None:
    """Write the page. Return a disk error instead of raising it: a run must not fail for a page."""
    path = folder / PAGE_FILE
    page = document_page(document)
    try:
        with explained_writes(path):
            # A file name may contain an unpaired surrogate, which cannot be encoded.
            write_atomically(path, page.encode(errors="replace"), durable=False)
    except PPOError as error:
        return error
    return None
