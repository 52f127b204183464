"""A table at the end of the run: cases tried and repelled, by part."""

from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.name


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many cases of each file were tried, and in how many nothing was lost."""
    tried, repelled = Counter[str](), Counter[str]()
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            path = Path(report.nodeid.partition("::")[0])
            if path.parent.name == HERE and (report.when == "call" or outcome == "error"):
                tried[path.stem] += 1
                repelled[path.stem] += outcome == "passed"
    if tried:
        terminalreporter.section("hostile cases")
        for part in sorted(tried):
            name = part.removeprefix("test_").replace("_", " ")
            terminalreporter.write_line(
                f"{name:20} {tried[part]:4} tried {repelled[part]:4} repelled"
            )
