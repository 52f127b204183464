"""A run of two processes that is killed and resumed ends as an undisturbed one, bit for bit."""

import random
from pathlib import Path

import pytest

from tests.helpers.runs.kill_matrix import UPDATES, Matrix, choose_moment, left_behind, read_counts

PHASES = ("rollout", "scoring", "update", "save")
ASYNC = "--async_save=true"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """The run, with the results of undisturbed runs in `whole` and, with ASYNC, in `async`."""
    made = Matrix(tmp_path_factory.mktemp("matrix"))
    made.run(made.folder / "whole", [None])
    made.run(made.folder / "async", [None], ASYNC)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["run", "run_under_torchrun"])
def test_a_run_that_is_killed_three_times_ends_as_one_that_is_not(
    matrix: Matrix, tmp_path: Path, launch: str
):
    counts = read_counts(matrix.folder / "whole")
    chance = random.Random(6)
    # Each kill is in the middle of the second remaining update.
    second = (1.3 / UPDATES, 1.7 / UPDATES)
    moments = [
        choose_moment(counts, phase, chance, between=second)
        for phase in ("save", "rollout", "update")
    ]
    output = tmp_path / "killed"
    said = getattr(matrix, launch)(output, [*moments, None])
    assert [line.split(": ")[-1] for line in said.splitlines() if "Resumed from" in line] == [
        "1 updates are done.",
        "2 updates are done.",
        "3 updates are done.",
    ]
    assert left_behind(output) == left_behind(matrix.folder / "whole"), moments


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_at_random_moments_ends_as_one_that_is_not(
    matrix: Matrix, tmp_path: Path, seed: int
):
    # Half of the runs write checkpoints while training continues, which takes other events.
    flags, undisturbed = ([ASYNC], "async") if seed >= 10 else ([], "whole")
    counts = read_counts(matrix.folder / undisturbed)
    moment = choose_moment(counts, PHASES[seed % 4], random.Random(seed), between=(0.0, 0.95))
    output = tmp_path / "killed"
    matrix.run(output, [moment, None], *flags)
    assert left_behind(output) == left_behind(matrix.folder / "whole"), moment
