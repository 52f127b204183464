"""The files of reports: read as they were written, and refused where they are damaged."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.results.report_files import REWARD_REPORT_FILE, as_json, read_report, write_report
from pipeline.results.reward_report import RewardReport
from ppo_core.errors import DataError
from tests.helpers.paths import ROOT
from tests.helpers.sample_reports import reward_report


def rewritten(report: Any, folder: Path) -> tuple[Any, bytes, bytes]:
    """The report as it is read from its file, its file, and the file of what was read."""
    first, second = folder / "first.json", folder / "second.json"
    write_report(first, report)
    read = read_report(first, type(report))
    write_report(second, read)
    return read, first.read_bytes(), second.read_bytes()


@pytest.mark.parametrize(
    "report", [reward_report(), reward_report(margins=False)], ids=["by people", "by the model"]
)
def test_a_report_is_read_as_it_was_written(report: RewardReport, tmp_path: Path):
    read, first, second = rewritten(report, tmp_path)
    assert read == report
    assert first == second


def test_counts_stay_counts_and_numbers_without_value_stay_so(tmp_path: Path):
    report = replace(reward_report(), training={"loss": 1.0, "steps": 4}, bias=math.nan, gain=1.0)
    read, first, second = rewritten(report, tmp_path)
    assert first == second
    assert (read.training, math.isnan(read.bias)) == ({"loss": 1.0, "steps": 4}, True)
    assert b'"training": {"loss": 1.0, "steps": 4}' in first


def test_a_field_that_this_version_does_not_know_is_left_out(tmp_path: Path):
    file = tmp_path / REWARD_REPORT_FILE
    file.write_text(json.dumps(as_json(reward_report()) | {"of the next version": [1]}))
    assert read_report(file, RewardReport) == reward_report()


def test_a_report_of_a_version_that_knew_no_acceptance_by_hand_is_read(tmp_path: Path):
    file, report = tmp_path / REWARD_REPORT_FILE, as_json(reward_report())
    del report["accepted_by_hand"]
    file.write_text(json.dumps(report))
    assert not read_report(file, RewardReport).accepted_by_hand


DAMAGED = {
    "accuracy.low": "0.5",
    "accuracy.n": 1.5,
    "accuracy.by_category.reviews.n": None,
    "accuracy.ties": None,
    "accuracy.people.mean": [0.5],
    "calibration.bins": {},
    "calibration.bins.0.confidence": "high",
    "contract.odd_scores.empty": "-0.31",
    "contract.vocabulary.digest": 7,
    "fit": "yes",
    "probes.probes.flattery.gating": 1,
    "reasons": "none",
    "samples.counts.0": True,
    "samples.quantiles": [],
}


def parent_of(report: dict[str, Any], field: str) -> tuple[Any, Any]:
    """The part of a report that holds a field, and the field's key in it."""
    *parts, last = (int(part) if part.isdigit() else part for part in field.split("."))
    for part in parts:
        report = report[part]
    return report, last


def refusal_of(report: dict[str, Any], file: Path) -> str:
    file.write_text(json.dumps(report))
    with pytest.raises(DataError) as refused:
        read_report(file, RewardReport)
    return str(refused.value)


@pytest.mark.parametrize("field", DAMAGED)
def test_a_value_of_another_type_is_refused_by_its_file_and_field(field: str, tmp_path: Path):
    report = json.loads(json.dumps(as_json(reward_report())))
    inner, key = parent_of(report, field)
    inner[key] = DAMAGED[field]
    refusal = refusal_of(report, tmp_path / REWARD_REPORT_FILE)
    assert f"'{tmp_path / REWARD_REPORT_FILE}' is damaged" in refusal
    assert f": {field}: " in refusal


@pytest.mark.parametrize(
    "field", ["accuracy", "accuracy.ties.auc", "bias", "calibration.bins.1.n", "contract.reasons"]
)
def test_a_field_that_is_missing_is_refused_by_its_file_and_name(field: str, tmp_path: Path):
    report = json.loads(json.dumps(as_json(reward_report())))
    inner, key = parent_of(report, field)
    del inner[key]
    refusal = refusal_of(report, tmp_path / REWARD_REPORT_FILE)
    assert f"{REWARD_REPORT_FILE}' is damaged" in refusal
    assert f": {field}: Field required." in refusal


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"fit": tru', '{"fit": true, "fit": false}'])
def test_a_file_that_is_no_report_is_refused_by_its_name(text: str, tmp_path: Path):
    file = tmp_path / REWARD_REPORT_FILE
    file.write_text(text)
    with pytest.raises(DataError, match=r"reward-model\.json'"):
        read_report(file, RewardReport)


@pytest.mark.parametrize("module", ["step_records", "report_files", "reward_report"])
def test_unpickling_a_record_imports_nothing_large(module: str):
    code = (
        f"import sys; import pipeline.results.{module}; import pipeline.evaluation.results; "
        "print({'torch', 'numpy', 'mlflow', 'pydantic', 'transformers'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "flows",
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert ran.stdout.strip() == "set()"
