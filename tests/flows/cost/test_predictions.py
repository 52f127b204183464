"""Compare computed memory and time of real trainings with the measured ones.

The largest policy needs 13 GB, so only `python -m tests.benchmarks.predictions` trains it.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.predictions import SHARDINGS, SIZES, measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("case", SIZES[:-1], ids=lambda case: case.name)
def test_computed_memory_is_within_15_percent_and_time_within_a_factor_of_3(
    case, sharding: str, tmp_path: Path
):
    found = measure(replace(case, sharding=sharding), tmp_path)
    assert 0.85 < found.memory_ratio < 1.15
    # On an idle machine the ratio was 0.79 to 1.04 (MEMORY.md). Tests that run at the same time
    # slow down the training or the measurement of the speed.
    assert 1 / 3 < found.time_ratio < 3
