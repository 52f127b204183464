"""A line of metrics an update, whatever happened in between."""

import json
from pathlib import Path

from ppo_core.reporting.metrics_file import METRICS_FILE, MetricsFile, read_metrics


def test_a_line_an_update(tmp_path: Path):
    file = MetricsFile(tmp_path / "out")
    file.cut_back(0)
    file.append(1, {"a": 0.5})
    file.append(2, {"a": 0.25, "b": float("nan")})
    lines = file.path.read_text().splitlines()
    assert file.path == tmp_path / "out" / METRICS_FILE
    assert lines[0] == '{"update": 1, "a": 0.5}'
    assert [line["update"] for line in read_metrics(file.path)] == [1, 2]


def test_a_run_that_goes_on_keeps_the_lines_up_to_there_in_another_file(tmp_path: Path):
    file = MetricsFile(tmp_path)
    file.cut_back(0)
    for update in (1, 2, 3):
        file.append(update, {"a": update / 4})
    inode = file.path.stat().st_ino
    file.cut_back(2)
    assert file.path.stat().st_ino != inode
    file.append(3, {"a": 7.0})
    assert [line["a"] for line in read_metrics(file.path)] == [0.25, 0.5, 7.0]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_new_run_does_not_go_on_in_the_file_of_an_earlier_one(tmp_path: Path):
    file = MetricsFile(tmp_path)
    file.path.write_text('{"update": 1, "a": 1.0}\n')
    file.cut_back(0)
    assert read_metrics(file.path) == []


def test_a_line_that_was_not_finished_is_none(tmp_path: Path):
    file = MetricsFile(tmp_path)
    file.path.write_text('{"update": 1, "a": 1.0}\n{"update": 2, "a"')
    assert [line["update"] for line in read_metrics(file.path)] == [1]
    file.cut_back(5)
    file.append(2, {"a": 2.0})
    assert [json.loads(line)["update"] for line in file.path.read_text().splitlines()] == [1, 2]


def test_there_may_be_no_file_yet(tmp_path: Path):
    assert read_metrics(tmp_path / METRICS_FILE) == []
