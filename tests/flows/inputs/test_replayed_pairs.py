"""New pairs all train the reward model, and a quarter of those that trained it before."""

from collections.abc import Sequence
from importlib.util import spec_from_file_location
from pathlib import Path

import pyarrow
import pytest

from pipeline.inputs import row_digests
from pipeline.inputs.replayed_pairs import (
    REPLAYED,
    inherited_rows,
    new_and_replayed,
    read_start_rows,
    trained_pairs,
)
from pipeline.inputs.row_digests import ROWS_FILE, digest_of_row, write_digests
from pipeline.inputs.run_data import RunData
from pipeline.settings.make_settings import make_settings
from ppo_core.data.rows.read_rows import Rows, read_rows
from ppo_core.errors import DataError, ModelError
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_rows


def pairs(folder: Path, numbers: Sequence[int]) -> Rows:
    rows = [
        {"prompt": f"w{n} w{n // 50}", "chosen": f"w1 w{n % 7}", "rejected": f"w2 w{n % 5}"}
        for n in numbers
    ]
    return read_rows(write_rows(folder / f"{numbers[0]}-{len(rows)}.jsonl", rows), "pairs")


def digests(rows: Rows) -> set[bytes]:
    return {digest_of_row(row) for row in rows}


def test_all_new_pairs_and_a_share_of_the_others_are_kept(tmp_path: Path):
    everything, old = pairs(tmp_path, range(1200)), digests(pairs(tmp_path, range(1000)))
    kept = digests(new_and_replayed(everything, old, seed=1))
    new = digests(everything) - old
    assert len(new) == 200 and new <= kept
    # Binomial, with a standard deviation of 1.4 points.
    assert len(kept & old) / len(old) == pytest.approx(REPLAYED, abs=0.05)
    assert digests(new_and_replayed(everything, old, seed=2)) != kept
    # A pair is drawn by itself, not by its place.
    backwards = pairs(tmp_path, range(1199, -1, -1))
    assert digests(new_and_replayed(backwards, old, seed=1)) == kept


def test_without_old_pairs_nothing_is_left_out_and_the_digest_tells(tmp_path: Path):
    rows = pairs(tmp_path, range(100))
    assert digests(new_and_replayed(rows, [], seed=1)) == digests(rows)
    old = digests(pairs(tmp_path, range(50)))
    assert new_and_replayed(rows, old, seed=1).digest != rows.digest


def test_other_code_of_the_digest_gives_another_key(tmp_path: Path, monkeypatch):
    rows = pairs(tmp_path, range(10))
    key = new_and_replayed(rows, [], seed=1).key
    source = tmp_path / "row_digests.py"
    source.write_text(f"{Path(row_digests.__file__).read_text()}# changed\n")
    spec = spec_from_file_location(row_digests.__name__, source)
    monkeypatch.setattr(row_digests, "__spec__", spec)
    assert new_and_replayed(rows, [], seed=1).key != key


def test_if_no_pair_is_left_an_error_says_so(tmp_path: Path):
    one = pairs(tmp_path, [0])
    with pytest.raises(DataError, match="all 1 pairs have trained the reward model"):
        # Each seed replays the pair with a probability of a quarter.
        for seed in range(20):
            new_and_replayed(one, digests(one), seed=seed)


def test_later_models_draw_other_pairs(tmp_path: Path):
    first, second = digests(pairs(tmp_path, range(1000))), digests(pairs(tmp_path, range(1100)))
    everything = pairs(tmp_path, range(1200))
    drawn = [digests(new_and_replayed(everything, old, seed=1)) & first for old in (first, second)]
    # Independent draws of a quarter have a quarter of each other.
    assert len(drawn[0] & drawn[1]) / len(drawn[0]) == pytest.approx(REPLAYED, abs=0.1)


def test_rows_that_cannot_be_read_are_an_error_that_names_the_folder(tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no readable rows\.parquet"):
        read_start_rows(tmp_path)
    (tmp_path / ROWS_FILE).write_text("no parquet")
    with pytest.raises(ModelError, match=r"has no readable rows\.parquet"):
        read_start_rows(tmp_path)


def test_the_rows_of_a_start_come_down_to_the_versions_after_it(tmp_path: Path):
    data = RunData(make_settings(tiny_table(tmp_path), {}))
    table = None
    for week in ("first", "second", "third"):
        (tmp_path / week).mkdir()
        write_digests(data.digested(), tmp_path / week / ROWS_FILE, table)
        seen = read_start_rows(tmp_path / week)
        assert trained_pairs(seen) == digests(data.training_pairs())
        table = inherited_rows(seen)
        assert set(table["data_set"].to_pylist()) == {"start", "start-pairs"}
        assert table.schema == seen.schema
        of_evaluation = {digest_of_row(row) for row in data.evaluation_rows()}
        assert of_evaluation.isdisjoint(table["digest"].to_pylist())
    assert isinstance(table, pyarrow.Table)
    assert {digest_of_row(row) for row in data.sft_rows()} <= {*table["digest"].to_pylist()}
