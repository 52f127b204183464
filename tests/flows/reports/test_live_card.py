"""The card of a training changes in an open browser while the training runs."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.servers.browser import CHROMEDRIVER, CHROMIUM, Browser, chromium
from tests.helpers.servers.servers import free_port, wait_until_answering

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs Chromium and its driver"),
]

FLOW = """
import time
from pathlib import Path
from metaflow import FlowSpec, card, current, step
from pipeline.reports.document import Document, Section, ShownProgress
from pipeline.reports.live import live_card

live_card.CARD_SECONDS, live_card.DATA_SECONDS = 4.0, 2.0

def document(done):
    shown = ShownProgress(phase="ppo", done=done, total=64, details=f"{done} of 64 episodes")
    section = Section(title="How far is it?", progress=shown)
    return Document(
        subject="Run 1", verdict="The run is not finished", tone="warning", reasons=(),
        sections=(section,),
    )

class LiveFlow(FlowSpec):
    @card(type="blank", id="training", refresh_interval=0)
    @step
    def start(self):
        shown = live_card.LiveCard(current.card)
        while not Path("stop").exists():
            shown.show(document(48 if Path("go").exists() else 12))
            time.sleep(0.2)
        self.next(self.end)

    @step
    def end(self):
        pass

if __name__ == "__main__":
    LiveFlow()
"""


@contextmanager
def started(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "USERNAME": "tester"}
    with (folder / f"{command[0]}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "live.py", *command],
            cwd=folder,
            env={**environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def shown_text(browser: Browser) -> str:
    browser.choose_frame(None)
    if not browser.run("return document.querySelectorAll('iframe').length"):
        return ""
    browser.choose_frame(0)
    return str(browser.run("return document.body.innerText"))


def test_an_open_page_of_the_card_follows_the_training(tmp_path: Path):
    (tmp_path / "live.py").write_text(FLOW)
    port = free_port()
    with started(tmp_path, "run") as run:
        wait_until(lambda: bool([*tmp_path.glob(".metaflow/mf.cards/**/*.html")]))
        with (
            started(
                tmp_path, "card", "server", "--port", str(port), "--poll-interval", "1"
            ) as server,
            chromium(tmp_path) as browser,
        ):
            wait_until_answering(f"http://127.0.0.1:{port}/", server, tmp_path / "card.log")
            browser.open(f"http://127.0.0.1:{port}/")
            wait_until(lambda: "12 of 64 episodes" in shown_text(browser))
            assert run.poll() is None
            (tmp_path / "go").touch()
            wait_until(lambda: "48 of 64 episodes" in shown_text(browser))
            assert run.poll() is None
            (tmp_path / "stop").touch()
            assert run.wait(timeout=60) == 0
