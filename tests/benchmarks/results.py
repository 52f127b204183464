"""RESULTS.md: generated tables, and a part below them that is written by hand."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

KEPT = "## What was tried and did not pay"
"""Heading of the part that is written by hand."""


def as_markdown(table: Table) -> str:
    """Return a table of rich as Markdown, with its title as a heading."""
    title, table.title = table.title, None
    shown, table.box = table.box, box.MARKDOWN
    text = StringIO()
    Console(file=text, width=400).print(table)
    table.title, table.box = title, shown
    lines = [line.rstrip() for line in text.getvalue().strip().splitlines()]
    return "\n".join([f"### {title}", "", *lines, ""])


def write_results(path: Path, machine: Sequence[str], tables: Sequence[Table]) -> None:
    """Write machine and tables; keep the text after the heading `KEPT`."""
    kept = ""
    if path.exists():
        _, _, kept = path.read_text().partition(KEPT)
    about = f'Written by `make bench`, down to the section "{KEPT.removeprefix("## ")}".'
    facts = "\n".join(f"- {line}" for line in machine)
    measured = "\n".join(as_markdown(table) for table in tables)
    parts = ["# Results", about, facts, "## Measured", measured]
    path.write_text("\n\n".join(parts) + f"\n{KEPT}{kept or chr(10)}")
