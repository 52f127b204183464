"""`make docs`: build the site of the documentation; fail at a broken link.

The pages lie in build/docs-pages as in the repository, so links between files need no change. A
linked file that is not a page, such as a script, becomes a page that shows it. The pages of the
reference are made from the code. The site in build/docs needs no server and no network.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.docs.reference_pages import reference_pages
from tests.helpers.paths import ROOT

CONFIG = ROOT / "docs" / "zensical.toml"

WORKER = "docs/iframe-worker.js"
"""Script of the search, which the configuration names."""

REFERENCE = "docs/reference"
"""Folder of the pages that are made from the code."""

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
"""The file that a link of a page names."""

PICTURES = {".png", ".svg"}

LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json"}


def build_site(site: Path, work: Path) -> None:
    """Write the site into the folder `site`, and its Markdown into the folder `work`.

    Raises:
        FileNotFoundError: a page links a file that does not exist.
        UndocumentedError: a part of the reference has no docstring.
        CalledProcessError: the site has a broken link; the process has printed where.
    """
    for folder in (site, work):
        shutil.rmtree(folder, ignore_errors=True)
    pages = work / "pages"
    write_pages(pages)
    shutil.copy(CONFIG, work)
    generate(work)
    (work / "site").rename(site)


def generate(work: Path) -> None:
    """Make the site of a folder with a configuration and pages.

    Raises:
        CalledProcessError: a page has a broken link.
    """
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", CONFIG.name]
    subprocess.run(command, cwd=work, check=True)


def write_pages(folder: Path) -> None:
    """Write the pages of the navigation, everything that they link, and the reference."""
    for name, text in reference_pages().items():
        path = folder / REFERENCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / WORKER, folder / WORKER)
    waiting = {ROOT / name for name in named_pages() if not name.startswith(REFERENCE)}
    written: set[Path] = set()
    while waiting:
        path = waiting.pop()
        written.add(path)
        target = folder / page_of(path.relative_to(ROOT))
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in PICTURES:
            shutil.copy(path, target)
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            waiting |= {*linked_files(path, text)} - written
            text = LINK.sub(lambda link: str(page_of(Path(link[0]))), text)
        else:
            text = shown_file(path, text)
        target.write_text(text, encoding="utf-8")


def named_pages() -> Iterator[str]:
    """Yield the paths in the navigation of the site."""
    waiting = list(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"])
    while waiting:
        (entry,) = waiting.pop().values()
        if isinstance(entry, str):
            yield entry
        else:
            waiting += entry


def linked_files(page: Path, text: str) -> Iterator[Path]:
    """Yield the files of the repository that a page links."""
    for name in LINK.findall(text):
        if "://" not in name and not name.startswith("mailto:"):
            yield Path(os.path.normpath(page.parent / name))


def page_of(path: Path) -> Path:
    """Return the path of the page that shows a file."""
    has_page = path.suffix in {".md", *PICTURES} or ":" in str(path)
    return path if has_page else path.with_name(f"{path.name}.md")


def shown_file(path: Path, text: str) -> str:
    """Return a page with the text of a file, which the search leaves out."""
    language = LANGUAGES.get(path.suffix, "text")
    title = path.relative_to(ROOT)
    return f"---\nsearch:\n  exclude: true\n---\n# {title}\n\n````{language}\n{text}````\n"


if __name__ == "__main__":
    build_site(ROOT / "build" / "docs", ROOT / "build" / "docs-pages")
