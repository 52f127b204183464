"""The files of reports are read as they were written, also by an earlier version."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.results.evaluation import EnsembleAgreement, PairAgreement, TrainedJudge
from pipeline.results.report_files import REWARD_REPORT_FILE, as_json, read_report, write_report
from pipeline.results.reward_report import RewardReport
from tests.helpers.inputs.sample_reports import changed, evaluation_result, reward_report
from tests.helpers.paths import ROOT

TRAINED = TrainedJudge(path="cache/judge-1", accuracy=0.7, low=0.6, high=0.79, n=90)

ENSEMBLE = EnsembleAgreement(
    outcomes={"one": ("first", "tie"), "other": ("second", "invalid")},
    rates={"one": 0.75, "other": None},
    pairs=[PairAgreement(judges=("one", "other"), n=1, share=0.0, kappa=None)],
    fleiss_kappa=None,
    n=1,
)


def rewritten(report: Any, folder: Path) -> tuple[Any, bytes, bytes]:
    """The report as it is read from its file, its file, and the file of what was read."""
    first, second = folder / "first.json", folder / "second.json"
    write_report(first, report)
    read = read_report(first, type(report))
    write_report(second, read)
    return read, first.read_bytes(), second.read_bytes()


def test_a_report_goes_through_a_link_and_leaves_the_link(tmp_path: Path):
    """A run of root with `--summary-json /dev/stdout > FILE` would replace /dev/stdout."""
    link = tmp_path / "stdout"
    (tmp_path / "file.json").touch()
    link.symlink_to("file.json")
    write_report(link, reward_report())
    assert link.is_symlink()
    assert read_report(tmp_path / "file.json", RewardReport) == reward_report()


def test_a_report_to_the_standard_output_stands_between_its_other_lines(tmp_path: Path):
    file = tmp_path / "out.txt"
    program = (
        "from dataclasses import make_dataclass; from pathlib import Path\n"
        "from pipeline.results.report_files import write_report\n"
        "report = make_dataclass('Report', ['fit'])(True)\n"
        "print('before', flush=True); write_report(Path('/dev/stdout'), report)\n"
        "print('\\nafter')"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"}
    with file.open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, env=environment, check=True)
    before, report, after = file.read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert json.loads(report)["fit"] is True


REPORTS = {
    "a reward model": reward_report(),
    "a reward model without people's margins": reward_report(margins=False),
    "an evaluation": evaluation_result(),
    "an evaluation with a champion": evaluation_result(champion=2),
    "an evaluation without references": evaluation_result(references=False, trained_judge=TRAINED),
    "an evaluation by an ensemble": changed(
        evaluation_result(),
        {"win_rate.ppo_vs_sft.agreement": ENSEMBLE, "kl.ppo": None},
    ),
}


@pytest.mark.parametrize("what", REPORTS)
def test_a_report_is_read_as_it_was_written(what: str, tmp_path: Path):
    read, first, second = rewritten(REPORTS[what], tmp_path)
    assert read == REPORTS[what]
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


@pytest.mark.parametrize("module", ["step_records", "report_files"])
def test_unpickling_a_record_imports_nothing_large(module: str):
    code = (
        f"import sys; import pipeline.results.{module}; "
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
