"""The site of the documentation is built strictly, and works without a server and a network."""

import re
import subprocess
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ppo_core.config.ppo_config import PPOConfig
from tests.docs import reference_pages
from tests.docs.build_site import CONFIG, REFERENCE, build_site, generate, named_pages
from tests.helpers.paths import ROOT
from tests.helpers.servers.browser import CHROMEDRIVER, CHROMIUM, chromium

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    build_site(folder / "site", folder / "work")
    return folder / "site"


@dataclass(frozen=True)
class HalfDescribed:
    described: int = 1
    """A number."""

    forgotten: int = 1


class Page(HTMLParser):
    """Anchors, links and requests of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.requests: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag == "a":
            self.links += [given["href"]] if "href" in given else []
        else:
            self.requests += [given[name] for name in ("src", "href", "srcset") if name in given]


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(found) > 40
    return found


def is_outside(address: str) -> bool:
    return re.match(r"(?!data:)(?:[a-z]+:)?//|[a-z]+:(?!image)", address) is not None


def test_no_page_requests_anything_from_outside(site: Path, pages: dict[Path, Page]):
    asked = {address for page in pages.values() for address in page.requests}
    assert any(address.endswith(".js") for address in asked)
    assert {address for address in asked if is_outside(address)} == set()
    for path in site.rglob("*.css"):
        named = re.findall(r"""(?:url\(|@import)\s*["']?([^"')]*)""", path.read_text())
        assert {address for address in named if is_outside(address)} == set()


def test_every_link_of_the_site_leads_to_a_page_and_its_anchor(pages: dict[Path, Page]):
    broken = [
        f"{path.name}: {link}"
        for path, page in pages.items()
        for link in page.links
        if not is_outside(link) and not leads_to_an_anchor(path, link, pages)
    ]
    assert broken == []


def leads_to_an_anchor(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    if target not in pages:
        return target.exists()
    return not anchor or anchor == "__skip" or anchor in pages[target].anchors


def test_every_page_of_docs_is_in_the_navigation():
    named = {*named_pages()}
    assert len(named) == len([*named_pages()])
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in ours if name not in named} == set()
    made = {f"{REFERENCE}/{name}" for name in reference_pages.reference_pages()}
    assert {name for name in named if name.startswith(REFERENCE)} == made


def test_every_setting_has_a_heading_with_type_bounds_and_default(pages: dict[Path, Page]):
    text = reference_pages.reference_pages()["ppo-settings.md"]
    assert "## `cliprange`\n\n*number, at least 0; default `0.2`*\n\nClip the probability" in text
    assert "*whole number, at least 1 or none; default `None`*" in text
    assert text.count("\n## ") == len(reference_pages.field_docs(PPOConfig))
    (page,) = (page for path, page in pages.items() if path.name == "ppo-settings.html")
    assert {"cliprange", "kl_estimator"} <= page.anchors


def test_a_setting_without_a_docstring_ends_the_build():
    with pytest.raises(reference_pages.UndocumentedError, match=r"HalfDescribed\.forgotten"):
        reference_pages.describe_settings(HalfDescribed, level=2)


def test_a_broken_link_ends_the_build(tmp_path: Path):
    pages = tmp_path / "pages"
    pages.mkdir()
    text = re.sub(r"nav = \[.*?^\]", 'nav = ["index.md"]', CONFIG.read_text(), flags=re.M | re.S)
    (tmp_path / CONFIG.name).write_text(text)
    write = (pages / "index.md").write_text
    write("# Page\n\n## There\n\n[link](#there)\n")
    generate(tmp_path)
    for link in ("#away", "away.md"):
        write(f"# Page\n\n## There\n\n[link]({link})\n")
        with pytest.raises(subprocess.CalledProcessError):
            generate(tmp_path)


@pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver")
def test_the_search_works_in_a_page_that_is_opened_as_a_file(site: Path, tmp_path: Path):
    with chromium(tmp_path) as browser:
        browser.open((site / "docs" / "metrics.html").as_uri())
        serious = re.compile(r"\((serious|critical)\)")
        # The menus belong to the theme.
        assert not [
            one for one in browser.accessibility_violations("article") if serious.search(one)
        ]
        browser.run(OPEN_SEARCH)
        deadline = time.monotonic() + 60
        while not (found := browser.run(SEARCH, "cliprange")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found[0].endswith("docs/reference/ppo-settings.html?h=cliprange#cliprange")
        # A request that the proxy refuses is an error on the console.
        assert browser.complaints() == []


OPEN_SEARCH = "document.querySelector('.md-search__button').click()"

SEARCH = """
const dialog = [...document.querySelectorAll("*")].find(one => one.shadowRoot)?.shadowRoot
const field = dialog?.querySelector("input")
if (!field) return []
if (field.value != arguments[0]) {
    field.value = arguments[0]
    field.dispatchEvent(new Event("input", {bubbles: true, composed: true}))
}
return [...dialog.querySelectorAll("a")].map(one => one.href)
"""
"""Type a text, and return the addresses of the pages that the search has found so far."""
