"""Computed memory of real trainings against their measured peak."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.predictions import SHARDINGS, SIZES, measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("case", SIZES[:3:2], ids=lambda case: case.name)
def test_the_computed_memory_is_within_15_percent_of_the_measured_peak(
    case, sharding: str, tmp_path: Path
):
    found = measure(replace(case, sharding=sharding), tmp_path)
    assert 0.85 < found.memory_ratio < 1.15
    # The time depends on what else the machine does, the order of magnitude less. What fsdp2 sends
    # is not in the computed time, and took 20 times as long on a busy machine.
    if sharding == "ddp":
        assert 0.1 < found.time_ratio < 10
