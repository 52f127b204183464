"""A table at the end of the run: each form in each use, and what came of it."""

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the property `form` of each test: what was read, and its outcome."""
    rows = [
        (*name.split("|"), value if outcome == "passed" else outcome.upper())
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call"
        for name, value in report.user_properties
        if name.count("|") == 2
    ]
    if rows:
        terminalreporter.section("forms of data")
        for use, form, container, result in sorted(rows):
            terminalreporter.write_line(f"{use:20} {form:32} {container:20} {result}")
