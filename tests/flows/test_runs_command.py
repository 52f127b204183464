"""`python flows/runs.py`: runs that MLflow does not have, and names that are not runs."""

import json
import sys
from contextlib import chdir
from pathlib import Path

import pytest

import runs
from pipeline.tracking.mlflow_client import connect
from pipeline.tracking.mlflow_runs import start_runs
from pipeline.tracking.run_list import ListedRun
from pipeline.tracking.run_record import record_processes
from ppo_core.errors.redacted_output import RedactedStream
from tests.helpers.servers.mlflow_store import tracking_to, write_database


@pytest.fixture
def folder(tmp_path: Path):
    """A folder with an empty MLflow, in which the commands run."""
    with chdir(tmp_path), tracking_to(write_database(tmp_path / "mlflow.db")):
        yield tmp_path / "outputs" / "runs"


def test_runs_of_this_machine_are_listed_even_if_mlflow_does_not_have_them(folder: Path, capsys):
    assert runs.main(["list"]) == 0
    assert "There is no run yet." in capsys.readouterr().out
    for number in ("1795736811895441", "1795736811895442", "17"):
        (folder / number).mkdir(parents=True)
    (folder / "notes").mkdir()
    # The inputs of this run were refused, so it never began.
    (folder / "1795736811895443" / "quarantine").mkdir(parents=True)
    record_processes(folder / "1795736811895442")
    assert runs.main(["list", "--json"]) == 0
    found = {one["run"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(found) == ["RLHF/17", "RLHF/1795736811895441", "RLHF/1795736811895442"]
    assert found["RLHF/1795736811895441"]["state"] == "not in MLflow"
    assert found["RLHF/1795736811895441"]["started"] == "2026-11-26T23:46:51+00:00"
    assert found["RLHF/1795736811895442"]["state"] == "running"
    assert runs.main(["diff", "17", "RLHF/1795736811895441"]) == 1
    said = capsys.readouterr().err
    assert "MLflow does not have RLHF/17" in said
    assert "outputs/runs/17" in said


def test_a_verdict_is_shown_with_its_model(capsys):
    for verdict, shown in (("failed", "failed (my-policy)"), (None, "")):
        run = ListedRun(
            run="RLHF/7", model="my-policy", started="2026-11-26T23:46", state="x", verdict=verdict
        )
        runs.show_list([run], as_json=False)
        (line,) = capsys.readouterr().out.splitlines()[1:]
        assert line.split("23:46 ")[1].strip() == f"x     {shown}".strip()


@pytest.mark.parametrize("name", ["99", "\x1b[2J", "RLHF", ""])
def test_a_name_that_is_no_run_is_answered_by_the_names_of_runs(folder: Path, capsys, name: str):
    (folder / "1795736811895441").mkdir(parents=True)
    assert runs.main(["diff", name, "1795736811895441"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "There is no run" in told.err
    assert "The newest runs are: RLHF/1795736811895441." in told.err
    assert "\x1b" not in told.err


def test_a_difference_in_the_query_of_an_address_is_printed_as_json(
    folder: Path, monkeypatch, capsys
):
    for number, prompts in ((7, "rows.jsonl"), (8, "https://host/rows.jsonl?key=secret")):
        run = start_runs("my-policy", f"RLHF/{number}", {}, {}, [])["parent"]
        connect().log_text(run, f'prompts = "{prompts}"', "settings.toml")
        connect().log_text(run, "", "packages.txt")
    redacted = RedactedStream(sys.stdout)
    monkeypatch.setattr(sys, "stdout", redacted)
    assert runs.main(["diff", "7", "8", "--json"]) == 0
    redacted.release()
    (row,) = json.loads(capsys.readouterr().out)["differences"]
    assert row == {
        "kind": "settings",
        "name": "prompts",
        "RLHF/7": "rows.jsonl",
        "RLHF/8": "https://host/rows.jsonl",
    }


def test_without_a_database_the_message_says_where_it_would_be(tmp_path: Path, capsys):
    with chdir(tmp_path), tracking_to(f"sqlite:///{tmp_path / 'none.db'}"):
        assert runs.main(["list"]) == 1
    assert "none.db" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()
