"""`python flows/feedback.py collect`, with traces on a real MLflow server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import AssessmentSource

import feedback
from serving.answer_traces import record_opinion
from tests.helpers.paths import ROOT
from tests.helpers.runs.served_answers import opinion_of, serve_answers
from tests.helpers.servers.servers import MlflowServer


@pytest.fixture
def name(server: MlflowServer) -> str:
    """A registered model with version 1."""
    made = f"policy-{uuid4().hex[:8]}"
    client = MlflowClient()
    client.create_registered_model(made)
    client.create_model_version(made, "s3://bucket/policy")
    return made


def collect(folder: Path, name: str, *more: str) -> int:
    return feedback.main(["collect", name, "--output-dir", str(folder), *more])


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def person(name: str) -> AssessmentSource:
    return AssessmentSource(source_type="HUMAN", source_id=name)


def test_judgments_and_corrections_of_people_become_rows(name: str, tmp_path: Path, capsys):
    ids = serve_answers(name, "1", {"a": "one", "b": "two", "c": "three", "d": "four"})
    record_opinion(name, ids["a"], user="ann", liked=True, correction=None)
    record_opinion(name, ids["a"], user="bob", liked=False, correction=None)
    record_opinion(name, ids["b"], user="ann", liked=False, correction="better")
    mlflow.log_feedback(trace_id=ids["c"], name="stars", value=5, source=person("ann"))
    # A model's opinion is not a person's.
    judge = AssessmentSource(source_type="LLM_JUDGE", source_id="judge")
    mlflow.log_feedback(trace_id=ids["d"], name="liked", value=True, source=judge)
    assert collect(tmp_path, name, "--liked-from", "4", "--disliked-to", "2") == 0
    rows = read(tmp_path / "feedback.jsonl")
    assert sorted(map(opinion_of, rows), key=str) == [
        ("a", "one", None, "ann"),
        ("a", None, "one", "bob"),
        ("b", "better", "two", "ann"),
        ("b", None, "two", "ann"),
        ("c", "three", None, "ann"),
    ]
    assert {row["version"] for row in rows} == {"1"}
    assert all(row["source"].startswith("trace tr-") and row["time"] for row in rows)
    told = capsys.readouterr().out
    assert "5 opinions of 2 known users: 2 answers liked, 2 disliked, 1 preferred" in told
    assert "1 answers have no feedback." in told
    assert "Users disagree on 1 answers or pairs of answers" in told


def test_what_cannot_be_used_is_left_out_by_name(name: str, tmp_path: Path, capsys):
    ids = serve_answers(name, "1", {"a": "one", "b": "two", "c": "x" * 200_001})
    unknown = serve_answers(name, "7", {"d": "four"})
    for liked in (True, True, False):
        record_opinion(name, ids["a"], user="ann", liked=liked, correction=None)
    mlflow.log_feedback(trace_id=ids["b"], name="stars", value=5, source=person("ann"))
    record_opinion(name, ids["b"], user="ann", liked=None, correction="two")
    record_opinion(name, ids["c"], user="ann", liked=True, correction=None)
    record_opinion(name, unknown["d"], user="\x1b[2Jeve", liked=True, correction=None)
    assert collect(tmp_path, name) == 0
    assert [*map(opinion_of, read(tmp_path / "feedback.jsonl"))] == [("a", None, "one", "ann")]
    reasons = sorted(row["reason"] for row in read(tmp_path / "left-out.jsonl"))
    assert reasons == [
        "a text has 200,001 characters, and at most 200,000 are read",
        "the answer is from version 7, which the registry does not have",
        "the correction is the answer itself",
        "the feedback 'stars' has the value 5.0, which is not a judgment",
        "the same user judged this answer again later",
        "the same user judged this answer again later",
    ]
    assert "\x1b" not in capsys.readouterr().out


def test_a_second_collection_writes_the_same_bytes(name: str, tmp_path: Path):
    ids = serve_answers(name, "1", {f"prompt {n}": f"answer {n}" for n in range(30)})
    for number, answer in enumerate(ids.values()):
        record_opinion(
            name, answer, user=f"user {number % 5}", liked=number % 3 > 0, correction=None
        )
    assert collect(tmp_path, name) == 0
    first = (tmp_path / "feedback.jsonl").read_bytes()
    assert first.count(b"\n") == 30
    # Killed while it reads or writes, it leaves the whole file.
    command = [sys.executable, "flows/feedback.py", "collect", name, "--output-dir", str(tmp_path)]
    for wait in (2.0, 3.0):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "feedback.jsonl").read_bytes() == first
    assert collect(tmp_path, name) == 0
    assert (tmp_path / "feedback.jsonl").read_bytes() == first


def test_an_opinion_on_an_answer_of_another_model_is_refused(name: str):
    ids = serve_answers("another", "1", {"a": "one"})
    for answer in (ids["a"], "tr-0", "'; DROP TABLE traces", "../../registered-models/get"):
        with pytest.raises(
            feedback.DataError, match=r"There is no answer|is not an id of an answer"
        ):
            record_opinion(name, answer, user="ann", liked=True, correction=None)
    with pytest.raises(feedback.DataError, match="The feedback is empty"):
        record_opinion("another", ids["a"], user="ann", liked=None, correction=None)


def test_without_opinions_nothing_is_written(name: str, tmp_path: Path, capsys):
    assert collect(tmp_path, name) == 1
    assert f"MLflow has no experiment '{name}-served'" in capsys.readouterr().err
    serve_answers(name, "1", {"a": "one"})
    assert collect(tmp_path, name) == 1
    assert "1 answers have no feedback. Nothing was written." in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_files_of_votes_are_read(tmp_path: Path, capsys):
    votes = [
        {"prompt": "a", "first": "x", "second": "y", "label": "second", "annotator": "ann"},
        {"prompt": "b", "first": "x", "second": "y", "label": "tie"},
    ]
    (tmp_path / "votes.jsonl").write_text("\n".join(map(json.dumps, votes)))
    (tmp_path / "thumbs.csv").write_text(
        "prompt,completion,label,annotator,time,version\n"
        "a,x,true,bob,2026-11-01,3\n"
        "a,x,false,bob,2026-11-02T10:00:00,3\n"
        "c,z,maybe,bob,,\n"
        "d,z,true,bob,yesterday,\n"
        "e,z,true,bob,1793523600.5,\n"
    )
    files = [str(tmp_path / name) for name in ("votes.jsonl", "thumbs.csv")]
    given = ("--only-votes", "--votes", files[0], "--votes", files[1])
    assert collect(tmp_path / "made", "policy", *given) == 0
    rows = read(tmp_path / "made" / "feedback.jsonl")
    assert [*map(opinion_of, rows)] == [
        ("a", "y", "x", "ann"),
        ("a", None, "x", "bob"),
        ("e", "z", None, "bob"),
    ]
    assert (rows[1]["version"], rows[1]["time"]) == ("3", "2026-11-02T10:00:00+00:00")
    assert rows[2]["time"] == "2026-11-01T09:00:00.500000+00:00"
    left_out = {row["source"]: row["reason"] for row in read(tmp_path / "made" / "left-out.jsonl")}
    assert left_out == {
        f"{files[0]}, row 1": "the label is a tie, or none of first, second and tie",
        f"{files[1]}, row 0": "the same user said the opposite later",
        f"{files[1]}, row 2": "without true or false in label",
        f"{files[1]}, row 3": "the time 'yesterday' is neither ISO 8601 nor seconds",
    }


def test_a_user_to_leave_out_who_gave_no_opinion_is_told(tmp_path: Path, capsys):
    file = tmp_path / "thumbs.csv"
    file.write_text("prompt,completion,label,annotator\na,x,true,ann\nb,x,true,bob\nc,x,true,\n")
    given = ("--only-votes", "--votes", str(file), "--without-user", "bob", "--without-user", "Eve")
    assert collect(tmp_path / "made", "policy", *given) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "Warning" in line]
    assert warnings == [
        "Warning: --without-user Eve leaves out nothing, because none of the 2 known users has "
        "this name."
    ]


def test_old_votes_are_left_out_by_date_or_by_weight(tmp_path: Path, capsys):
    file = tmp_path / "thumbs.csv"
    file.write_text(
        "prompt,completion,label,time\n"
        "a,x,true,2026-10-01\n"
        "b,x,true,2026-11-01\n"
        "c,x,true,2026-11-30\n"
        "d,x,true,\n"
    )
    given = ("--only-votes", "--votes", str(file), "--since", "2026-10-02", "--half-life", "1")
    assert collect(tmp_path / "made", "policy", *given) == 0
    assert [row["prompt"] for row in read(tmp_path / "made" / "feedback.jsonl")] == ["c"]
    reasons = {r["source"][-1]: r["reason"] for r in read(tmp_path / "made" / "left-out.jsonl")}
    weight = "its weight is below 0.0001 because of its age"
    date = "the opinion is from before 2026-10-02T00:00:00+00:00"
    # The vote without a time has the weight of the oldest vote.
    assert reasons == {"0": date, "1": weight, "3": weight}
    told = capsys.readouterr().out
    assert "1 opinions of 0 known users" in told
    assert f"Left out: 2 ({weight})." in told and f"Left out: 1 ({date})." in told


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (("--liked-from", "4"), "belong together"),
        (("--liked-from", "2", "--disliked-to", "4"), "must be below"),
        (("--half-life", "0"), "must be above 0 days"),
        (("--only-votes", "--votes", "none.jsonl"), "There is no file"),
        (("--only-votes", "--experiment", "e"), "--experiment e has no effect with --only-votes"),
        (
            ("--only-votes", "--liked-from", "0", "--disliked-to", "-1"),
            "--liked-from 0.0 has no effect with --only-votes",
        ),
    ],
)
def test_a_wrong_argument_is_refused(given: tuple[str, ...], fault: str, tmp_path: Path, capsys):
    assert collect(tmp_path, "policy", *given) == 1
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--since", "yesterday", "is not a day or time in ISO 8601"),
        # No score would be below it, so scores would be left out without a message.
        ("--liked-from", "nan", "must be a finite number"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused(
    option: str, value: str, fault: str, tmp_path: Path, capsys
):
    with pytest.raises(SystemExit):
        collect(tmp_path, "policy", option, value)
    assert f"{option}: {value} {fault}" in capsys.readouterr().err
