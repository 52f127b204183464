"""Damaged files of reports are refused by their name and field, before their figures are used."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cost.usage import FOLDER, recorded_attempts
from pipeline.inputs.flow_run import FlowRun
from pipeline.results.report_files import as_json, read_report
from pipeline.results.reward_report import RewardReport
from pipeline.storage.workspace import Workspace
from ppo_core.errors import DataError
from tests.helpers.inputs.sample_reports import evaluation_result, reward_report

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
    "win_rate": [],
    "win_rate.ppo_vs_sft": None,
    "win_rate.ppo_vs_sft.low": "high",
    "win_rate.ppo_vs_sft.by_length_ratio.0.n": 0.5,
    "win_rate.ppo_vs_sft.agreement": "none",
    "judge.version": 1,
    "canaries.kinds.empty.fell": 0,
    "people.confusion.tie.first": "1",
    "conclusive": None,
    "champion": "2",
    "length.ppo": None,
    "kl.ppo": "0.1",
    "spent": None,
}
"""Values that a field of a report cannot have."""

MISSING = (
    "accuracy",
    "accuracy.ties.auc",
    "bias",
    "calibration.bins.1.n",
    "contract.reasons",
    "win_rate.ppo_vs_sft.flip_rate",
    "win_rate.ppo_vs_sft.by_length_ratio.0.ratio",
    "canaries.kinds.empty.won",
    "people.kappa",
    "judge.name",
    "improvement",
    "spent",
)


def record_with(field: str) -> Any:
    """The sample report that has the field."""
    report, evaluation = reward_report(), evaluation_result()
    name = field.partition(".")[0]
    return evaluation if getattr(report, name, None) is None else report


def parent_of(report: dict[str, Any], field: str) -> tuple[Any, Any]:
    """The part of a report that holds a field, and the field's key in it."""
    *parts, last = (int(part) if part.isdigit() else part for part in field.split("."))
    for part in parts:
        report = report[part]
    return report, last


def refusal_of(field: str, change: Callable[[Any, Any], object], file: Path) -> str:
    """Why a report is refused; `change` gets the part that has the field, and the field's key."""
    record = record_with(field)
    report = json.loads(json.dumps(as_json(record)))
    change(*parent_of(report, field))
    file.write_text(json.dumps(report))
    with pytest.raises(DataError) as refused:
        read_report(file, type(record))
    assert f"'{file}' is damaged" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("field", DAMAGED)
def test_a_value_of_another_type_is_refused_by_its_file_and_field(field: str, tmp_path: Path):
    def replace_it(part: Any, key: Any) -> None:
        part[key] = DAMAGED[field]

    assert f": {field}=" in refusal_of(field, replace_it, tmp_path / "report.json")


@pytest.mark.parametrize("field", MISSING)
def test_a_field_that_is_missing_is_refused_by_its_file_and_name(field: str, tmp_path: Path):
    refusal = refusal_of(field, lambda part, key: part.pop(key), tmp_path / "report.json")
    assert f": {field} is missing." in refusal


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"fit": tru', '{"fit": true, "fit": false}'])
def test_a_file_that_is_no_report_is_refused_by_its_name(text: str, tmp_path: Path):
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"report\.json'"):
        read_report(file, RewardReport)


ATTEMPT = {"step": "train_policy", "started": 1.0, "seconds": 60.0, "gpus": 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", None), ("started", "noon"), ("seconds", "60"), ("gpus", 1.5), ("machines", [])],
)
def test_the_damaged_time_of_a_step_is_left_out_by_its_file_and_field(
    field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = FlowRun(id="RLHF/7", workspace=Workspace(str(tmp_path)), tracking={}, origin={}, data=[])
    file = run.folder / FOLDER / "train_policy-1.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(ATTEMPT))
    (attempt,) = recorded_attempts(run)
    assert attempt.gpu_seconds == 120
    file.write_text(json.dumps(ATTEMPT | {field: value}))
    assert recorded_attempts(run) == []
    said = capsys.readouterr().out
    assert re.search(rf"Warning: .*train_policy-1\.json' is damaged.*: {field}=", said)
