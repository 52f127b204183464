"""`make screenshots`: pictures of the pages of the newest run, for README and the documentation.

Needs Chromium with its driver, and a run of the flow that has ended in this folder (`make run`).
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.inputs.json_lines import read_jsonl, write_jsonl
from tests.helpers.paths import ROOT
from tests.helpers.servers.browser import CHROMEDRIVER, CHROMIUM, chromium
from tests.helpers.servers.label_page import served

PICTURES = ROOT / "docs" / "images"

PHONE, DESKTOP = 390, 1200
"""Widths in pixels."""

AREA = """
const found = [...document.querySelectorAll("h2, h3")];
const top = name => found.find(one => one.textContent.startsWith(name))
  .getBoundingClientRect().top + scrollY;
const [first, next] = arguments;
const start = first ? top(first) - 16 : 0;
return [start, (next ? top(next) - 16 : document.documentElement.scrollHeight) - start];
"""
"""Top and height of the part of a page from one heading to another."""


def take_pictures(run: Path, folder: Path) -> None:
    """Write pictures of the page of a run, and of the page that labels pairs."""
    page = (run / "index.html").as_uri()
    with TemporaryDirectory() as name, chromium(Path(name)) as browser:

        def picture(file: str, first: str, following: str, width: int = DESKTOP) -> None:
            browser.look_as(width, dark=width == PHONE)
            browser.open(page)
            top, height = browser.run(AREA, first, following)
            browser.take_picture(folder / file, top=top, height=height, width=width)

        picture("run-page.png", "", "Why was it")
        picture("run-page-phone.png", "", "Win rates", PHONE)
        picture("run-page-curves.png", "How did PPO go?", "How did the training of SFT")
        picture("run-page-answers.png", "How did its answers change", "Training prompt 4")
        with served(_pairs_of(run, Path(name)), Path(name) / "labeled.jsonl") as address:
            browser.look_as(DESKTOP, dark=False)
            browser.open(address)
            browser.take_picture(folder / "label-page.png", top=0, height=430, width=DESKTOP)


def _pairs_of(run: Path, folder: Path) -> str:
    """Write the pairs of a run's evaluation as a file to label; return its path."""
    pairs = [
        {"prompt": row["prompt"], "first": row["sft"], "second": row["ppo"], "label": ""}
        for row in read_jsonl(run / "evaluation" / "samples.jsonl")
    ]
    write_jsonl(folder / "to-label.jsonl", pairs)
    return str(folder / "to-label.jsonl")


if __name__ == "__main__":
    if not (CHROMIUM and CHROMEDRIVER):
        sys.exit("Pictures need Chromium and its driver: apt install chromium chromium-driver")
    evaluated = sorted((ROOT / "outputs" / "runs").glob("*/evaluation/samples.jsonl"))
    if not evaluated:
        sys.exit("outputs/runs has no evaluated run, so there is nothing to show: make run")
    take_pictures(evaluated[-1].parents[1], PICTURES)
