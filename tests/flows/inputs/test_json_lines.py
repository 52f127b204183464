"""Files of rows in JSON Lines: a file has its full old or its full new content."""

from pathlib import Path

import pytest

from pipeline.inputs.json_lines import read_jsonl, write_jsonl
from ppo_core.errors import TrainingError
from tests.helpers.servers.full_disk import full_disk


def test_rows_that_do_not_fit_on_the_disk_leave_the_earlier_file_as_it_was(tmp_path: Path):
    path = tmp_path / "judgements.jsonl"
    write_jsonl(path, [{"number": 0}])
    rows = ({"number": number} for number in range(1000))
    with full_disk(1000), pytest.raises(TrainingError, match=f"'{path}' cannot be written"):
        write_jsonl(path, rows)
    assert read_jsonl(path) == [{"number": 0}]
    assert list(tmp_path.iterdir()) == [path]
