"""MLflow's own pages of a run full of hostile texts: nothing runs, no markup of others is drawn."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

import pytest

from pipeline.registry.ledger import RUN_TAG
from pipeline.tracking.mlflow_client import connect
from tests.helpers.inputs.sample_reports import HOSTILE
from tests.helpers.runs.hostile_run import (
    FOLDER,
    MARKDOWN,
    NAME,
    PERSON,
    TEXTS,
    HostileRun,
    log_hostile_run,
)
from tests.helpers.servers.browser import CHROMEDRIVER, CHROMIUM, Browser, chromium
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import shared_server

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="needs Chromium and its driver"
)

SECONDS = 60.0
"""Limit for a page to show what it should."""

LATER = 0.5
"""Seconds after which a script or an image of a page has asked for its address."""

STRANGE = re.compile(r"192\.0\.2\.1|javascript:|example\.org|github\.com/ada|/stranger|/x$")
"""An address that only the hostile texts name."""

LOOK = """
const all = [...document.querySelectorAll("*")];
const absolute = value => {
  try { return new URL(value, document.baseURI).href } catch { return value }
};
const names = "href src srcset xlink:href action formaction data poster background".split(" ");
return {
  titles: [document.title],
  frames: window.length,
  handlers: all.flatMap(
    one => one.getAttributeNames().filter(name => name.startsWith("on"))
      .map(name => `${one.localName} ${name}`)),
  addresses: all.flatMap(
    one => names.filter(name => one.hasAttribute(name))
      .map(name => `${one.localName} ${absolute(one.getAttribute(name))}`)),
  words: all.filter(one => one.textContent === "stranger").map(one => one.localName),
};
"""
"""What a frame has that could be a stranger's."""

MISSING = """
const text = document.body?.textContent ?? "";
return arguments[0].filter(one => !text.includes(one));
"""

CLICK = """
const has = one => one.textContent.includes(arguments[0]);
const deepest = [...document.body.querySelectorAll("*")].find(
  one => has(one) && ![...one.children].some(has));
deepest?.click();
return Boolean(deepest);
"""


@dataclass(frozen=True)
class Page:
    """A page of MLflow."""

    address: str
    """Its address below that of the server, with names of `places` in braces."""

    shows: Sequence[str]
    """Texts that are on it or in its frame."""

    click: str = ""
    """Text to click on first."""

    frames: int = 0
    """Number of frames that MLflow makes for an HTML file."""


def as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


PARENT, REWARD, TRAINING, EVALUATION = (
    f"experiments/{{experiment}}/runs/{{{step}}}"
    for step in ("parent", "validate_reward_model", "train_policy", "evaluate_win_rate")
)

DIRECTION = re.compile(r"[\u202a-\u202e\u2066-\u2069]")

PAGES = {
    "experiments": Page("experiments", [f"promotions of {NAME}"]),
    "runs": Page("experiments/{experiment}/runs", [NAME]),
    "charts": Page("experiments/{experiment}/runs?compareRunsMode=CHART", [NAME]),
    "run": Page(PARENT, [NAME, FOLDER, HOSTILE, TEXTS[1]]),
    "data set": Page(PARENT, ["Source type: Local", f"{FOLDER}/pairs.jsonl"], "preferences-test ("),
    "summary": Page(f"{PARENT}/artifacts/summary.json", [as_json(text) for text in TEXTS]),
    "settings": Page(f"{PARENT}/artifacts/settings.toml", [as_json(NAME), as_json(FOLDER)]),
    "failed step": Page(TRAINING, [f"train_policy failed: It said {HOSTILE} {MARKDOWN[2]}"]),
    "report on the reward model": Page(
        f"{REWARD}/artifacts/reward-model/report.html",
        [f"It likes {text}" for text in TEXTS],
        frames=1,
    ),
    "measurements": Page(
        f"{REWARD}/artifacts/reward-model/report.json", [as_json(text) for text in TEXTS]
    ),
    "report on the evaluation": Page(
        f"{EVALUATION}/artifacts/evaluation/report.html",
        [f"The judge said {text}" for text in TEXTS],
        frames=1,
    ),
    "page of the run": Page(
        f"{PARENT}/artifacts/index.html",
        ["Which answers won and lost?", *(f"The judge said {text}" for text in TEXTS)],
        frames=1,
    ),
    "answers": Page(f"{PARENT}/artifacts/samples.json", TEXTS),
    "an answer": Page(f"{PARENT}/artifacts/samples.json", ["Preview", *TEXTS], MARKDOWN[1]),
    "pairs": Page(f"{PARENT}/artifacts/pairs.json", TEXTS),
    "judgements": Page(
        f"{EVALUATION}/artifacts/judgements.jsonl", [as_json(text) for text in TEXTS]
    ),
    "models": Page("models", [NAME]),
    "model": Page("models/{model}", [f"experiment promotions of {NAME}.", PERSON]),
    "version": Page(
        "models/{model}/versions/{version}",
        # The description is cut after 5,000 characters; the card has the other texts.
        [f"Inconclusive: The judge said {text}" for text in TEXTS[:-3]],
    ),
    "uploaded model": Page("experiments/{experiment}/models/{logged_model}", [NAME]),
    "card": Page(
        "experiments/{experiment}/models/{logged_model}/artifacts",
        # The card is Markdown, which leaves out what changes the direction of the text.
        [f"Inconclusive: The judge said {DIRECTION.sub('', text)}" for text in TEXTS],
        "README.md",
    ),
    "history": Page("experiments/{history}/runs/{decisions}", [PERSON, f"{HOSTILE} {MARKDOWN[2]}"]),
}

QUICK = ("model", "version")
"""Pages with Markdown; the others take a minute together."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched, tracking_to(shared_server().url):
        patched.setattr("pipeline.registry.sync_aliases.TIMEOUT", 0.3)
        yield shared_server().url


@pytest.fixture(scope="module")
def logged(server: str, tmp_path_factory: pytest.TempPathFactory) -> HostileRun:
    return log_hostile_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def places(logged: HostileRun) -> dict[str, str]:
    """What stands in the addresses of pages."""
    client = connect()
    history = client.get_experiment_by_name(f"promotions of {NAME}")
    source = client.get_model_version(NAME, logged.version).source
    return {
        **logged.runs,
        "experiment": client.get_run(logged.runs["parent"]).info.experiment_id,
        "model": quote(NAME, safe=""),
        "version": logged.version,
        "logged_model": source.removeprefix("models:/"),
        "history": history.experiment_id,
        "decisions": history.tags[RUN_TAG],
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


def wait_for(left: Callable[[], list[str]]) -> list[str]:
    """Wait until nothing is left to wait for; return what is left after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while (what := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return what


def missing(browser: Browser, page: Page) -> list[str]:
    """The texts that the page, or its frame, does not show."""
    browser.choose_frame(None)
    if page.frames and browser.run("return window.length"):
        browser.choose_frame(0)
    return list(browser.run(MISSING, page.shows))


def look(browser: Browser) -> dict[str, Any]:
    """What the page has, together with its frames."""
    browser.choose_frame(None)
    seen = browser.run(LOOK)
    for number in range(seen["frames"]):
        browser.choose_frame(number)
        inside = browser.run(LOOK)
        seen = {name: seen[name] + inside[name] for name in seen}
    return seen


def visit(browser: Browser, address: str, page: Page) -> list[str]:
    """Open a page, and wait until it shows its texts; return what is wrong with it."""
    browser.choose_frame(None)
    # The texts of the page before could be taken for those of this one.
    browser.open("about:blank")
    before = len(browser.asked)
    browser.open(address)
    if page.click:
        wait_for(lambda: [] if browser.run(CLICK, page.click) else [page.click])
    left = [f"not shown: {text}" for text in wait_for(lambda: missing(browser, page))]
    time.sleep(LATER)
    return left + wrong(look(browser), page, browser.asked[before:])


def wrong(seen: dict[str, Any], page: Page, asked: Sequence[str]) -> list[str]:
    """What a stranger made the page do or show."""
    addresses = [unquote(address.partition("#")[0]) for address in seen["addresses"]]
    return [
        *(["a script ran"] if "fell" in seen["titles"] else []),
        *(f"asked for {address}" for address in asked if STRANGE.search(address)),
        *(f"handler {one}" for one in seen["handlers"]),
        *(f"address {one}" for one in addresses if STRANGE.search(one)),
        *(f"markup {one}" for one in seen["words"]),
        *([f"{seen['frames']} frames"] if seen["frames"] != page.frames else []),
    ]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PAGES],
)
def test_nothing_of_others_runs_or_is_drawn(
    name: str, browser: Browser, server: str, places: dict[str, str]
):
    page = PAGES[name]
    assert visit(browser, f"{server}/#/{page.address.format(**places)}", page) == []


@pytest.mark.parametrize(
    "name", ["report on the reward model", "report on the evaluation", "page of the run"]
)
def test_a_report_is_not_opened_by_its_address_and_is_inert_once_it_is_on_disk(
    name: str, browser: Browser, server: str, places: dict[str, str]
):
    step, path = PAGES[name].address.format(**places).split("/artifacts/")
    address = f"{server}/get-artifact?path={path}&run_uuid={step.rpartition('/')[2]}"
    browser.open("about:blank")
    browser.open(address)
    assert browser.run("return location.href") == "about:blank"
    kept = browser.downloads / path.rpartition("/")[2]
    assert not wait_for(lambda: [] if kept.exists() else ["a download"])
    kept = kept.rename(browser.downloads / f"{name}.html")
    assert visit(browser, kept.as_uri(), replace(PAGES[name], frames=0)) == []


def test_the_checks_find_scripts_and_markup_in_a_page_that_is_not_escaped(
    browser: Browser, server: str, places: dict[str, str]
):
    # An arrow ends the comment that would hide the texts after it.
    connect().log_text(places["parent"], f"<p>Raw.</p>{'-->'.join(TEXTS)}", "raw.html")
    address = f"{server}/#/{PARENT}/artifacts/raw.html".format(**places)
    found = visit(browser, address, Page("", ["Raw."], frames=1))
    assert {"a script ran", "asked for http://192.0.2.1/ran", "markup h1"} <= set(found)
    assert "address img http://192.0.2.1/img" in found
    assert {"handler img onerror", "handler svg onload"} <= set(found)


@pytest.mark.slow
def test_the_checks_find_links_and_images_in_a_description_that_is_not_escaped(
    browser: Browser, server: str
):
    connect().create_registered_model("raw", description="\n\n".join(["Raw.", NAME, *TEXTS]))
    found = visit(browser, f"{server}/#/models/raw", Page("", ["Raw."]))
    assert {"asked for http://192.0.2.1/image", "asked for http://192.0.2.1/name"} <= set(found)
    assert {"address a https://github.com/ada", "markup strong", "markup code"} <= set(found)
