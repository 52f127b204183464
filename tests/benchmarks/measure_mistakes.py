"""Seconds until a mistake of a first day is answered, beside the import time of its command.

    python -m tests.benchmarks.measure_mistakes

Only the cheap mistakes are run, which the command line and the settings decide. The import time is
that of the same command with --help, measured before each of them.
"""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hostile.first_day import environment_in, make_inputs, words_of
from tests.hostile.natural_mistakes import MISTAKES

LIMIT = 3.0
"""Seconds beyond the import time in which a mistake must be answered."""


def main() -> int:
    """Print a table; return 1 if an answer took longer than LIMIT beyond the import time."""
    late = 0
    print(f"{'mistake':45} {'help':>6} {'answer':>7} {'beyond':>7}")
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for title, mistake in MISTAKES.items():
            if mistake.is_cheap:
                _, words = words_of(mistake)
                is_flow = words[0].endswith("rlhf.py")
                helped = _seconds([*(words[:1] if is_flow else words[:2]), "--help"], folder)
                answered = _seconds(words, folder)
                late += answered - helped > LIMIT
                print(f"{title:45} {helped:6.2f} {answered:7.2f} {answered - helped:+7.2f}")
    print(f"{late} took longer than {LIMIT:g} s beyond the import time")
    return 1 if late else 0


def _seconds(words: list[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment_in(folder),
        capture_output=True,
        check=False,
    )
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
