"""`python flows/win_rate.py`: any model against the references of a data set, by any judge."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import mlflow
import psutil
import pytest
import transformers

import win_rate
from pipeline.launch import answers
from pipeline.launch.process_tree import ProcessIdentity
from tests.helpers.inputs.pipeline_inputs import JUDGE, write_model, write_rows
from tests.helpers.paths import ROOT
from tests.helpers.servers.full_disk import full_disk

FIRST = "def judge(prompts, pairs):\n    return ['first'] * len(pairs)\n"


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch) -> None:
    """A model, ten prompts with references that a judge who counts w1 likes, and judges."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "policy")
    rows = [{"prompt": f"w{i} w{i + 1}", "reference": "w1 " * 9} for i in range(10)]
    write_rows(tmp_path / "eval.jsonl", rows)
    (tmp_path / "counts.py").write_text(JUDGE)
    (tmp_path / "first.py").write_text(FIRST)


def run(*more: str, model: str = "policy", judge: str = "python:counts.py:judge") -> int:
    flags = ["--model", model, "--judge", judge, "--eval-prompts", "eval.jsonl"]
    return win_rate.main([*flags, "--response-length", "6", *more])


def test_the_rate_is_printed_with_its_interval_size_and_judge(capsys):
    assert run("--num-examples", "8") == 0
    told = capsys.readouterr().out
    line = re.search(r"^Model win rate: (.*)$", told, re.MULTILINE)
    assert line
    # No answer of 6 words has the 9 that the reference has; The bets exclude 52.4 % and more.
    assert line[1] == "0.00% (95% CI 0.0-52.4, n=8, judge python:counts.py:judge)"
    assert (
        "Won 0, lost 8, tied 0, no verdict 0; in 0.0% of the pairs, the judge chose the same "
        "position in both orders.\n" in told
    )


def test_the_figures_and_every_judgement_are_kept(tmp_path: Path):
    assert run("--summary-json", "figures.json", "--output-dir", "out") == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["win_rate"]["model_vs_reference"]["n"] == 10
    assert figures["canaries"]["sound"]
    assert figures["settings"]["model"] == "policy"
    assert figures["settings"]["temperature"] == 0.7
    assert figures["settings"]["judging"]["attempts"] == 3
    kept = [json.loads(line) for line in (tmp_path / "out/judgements.jsonl").open()]
    assert [row["outcome"] for row in kept] == ["second"] * 10
    assert kept[3]["prompt"] == "w3 w4"
    assert kept[3]["straight"] == kept[3]["swapped"] == {"winner": "second"}


@pytest.mark.slow
def test_two_commands_with_one_output_folder_leave_each_other_alone(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(answers, "gpus", lambda: 2)
    rows = [{"prompt": f"w{i} w{i + 1}", "reference": "w1 " * 9} for i in range(32)]
    write_rows(tmp_path / "eval.jsonl", rows)
    folder = tmp_path / "outputs" / "answers"
    folder.mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as other:
        identity = ProcessIdentity.of(psutil.Process(other.pid))
        (folder / "launcher-0.json").write_text(json.dumps(asdict(identity)))
        try:
            assert run() == 0
            assert other.poll() is None
        finally:
            other.kill()
    assert {path.name for path in folder.parent.iterdir()} == {"answers", "judgements.jsonl"}


def test_a_full_disk_is_named(capsys):
    with full_disk(1000):
        assert run("--output-dir", "out") == 1
    assert "win_rate: 'out/judgements.jsonl' cannot be written" in capsys.readouterr().err


def test_a_result_that_is_none_says_why_and_ends_with_1(capsys):
    assert run(judge="python:first.py:judge") == 1
    told = capsys.readouterr().out
    assert "Model win rate: 50.00% " in told
    assert "inconclusive)" in told
    assert re.search(r"^Inconclusive: .*position", told, re.MULTILINE)


def test_greedy_answers_depend_on_no_seed_and_sampled_ones_do(tmp_path: Path):
    def answers(*flags: str) -> list[str]:
        run(*flags)
        rows = (tmp_path / "outputs/judgements.jsonl").read_text().splitlines()
        return [json.loads(row)["candidate"] for row in rows]

    assert answers("--temperature", "0") == answers("--temperature", "0", "--seed", "2")
    assert answers() == answers()
    assert answers() != answers("--seed", "2")


def test_a_version_that_the_flow_did_not_register_is_refused(tmp_path: Path, mlflow_client, capsys):
    components = {
        "model": transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy"),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(tmp_path / "policy"),
    }
    with mlflow.start_run():
        mlflow.transformers.log_model(
            transformers_model=components,
            name="policy",
            task="text-generation",
            pip_requirements=["transformers"],
            registered_model_name="words",
        )
    assert run(model="models:/words/1") == 1
    assert "the flow did not register it" in capsys.readouterr().err
    assert run(model="models:/words/7") == 1
    assert "does not have version 7 of 'words'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--response-length", "0"], "response_length=0 must be a whole number"),
        (["--response-length", "63"], "context has 64 tokens, 63 of them"),
        (["--seed", "-1"], "seed=-1 must be at least 0"),
        (["--eval-prompts", "gone.jsonl"], "gone.jsonl"),
        (["--human-labels", "eval.jsonl"], "There is no column first, second, label"),
        (["--model", "nowhere"], "No tokenizer can be loaded from 'nowhere'"),
        (["--judge", "oracle"], "judge='oracle' is unknown"),
        (["--baseline-prompts", "64"], "baseline_prompts=64 is for the comparison of PPO with SFT"),
        (
            ["--temprature", "1"],
            "no setting --temprature, so 1 would change nothing. Did you mean",
        ),
        (["--summary-json", "."], "summary_json='.' is a folder"),
    ],
)
def test_what_cannot_work_is_refused_without_a_traceback(flags: list[str], message: str, capsys):
    assert run(*flags) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("references", "flags"), [([" "], ()), (["w2", " "], ()), (["w2", " "], ("--against-itself",))]
)
def test_blank_references_are_refused(
    references: list[str], flags: tuple[str, ...], tmp_path: Path, capsys
):
    rows = [{"prompt": "w1", "reference": text} for text in references]
    write_rows(tmp_path / "bare.jsonl", rows)
    assert run("--eval-prompts", "bare.jsonl", *flags) == 1
    assert f"1 of the {len(rows)} rows of bare.jsonl have no ref" in capsys.readouterr().err


def test_the_command_itself_runs_and_documents_its_flags(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, str(ROOT / "flows" / "win_rate.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--num-examples" in ran.stdout
    assert "Maximum number of tokens of an answer" in ran.stdout
    assert "OPENAI_API_KEY" in ran.stdout
    # The command would need s3fs for such an address.
    assert "s3://" not in ran.stdout


def test_a_model_against_itself_tests_judge_and_gate_without_references(tmp_path: Path, capsys):
    rows = [{"prompt": f"w{i} w{i + 1}"} for i in range(40)]
    write_rows(tmp_path / "bare.jsonl", rows)
    flags = ("--against-itself", "--eval-prompts", "bare.jsonl", "--summary-json", "figures.json")
    run(*flags)
    told = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    rate = figures["win_rate"]["model_vs_itself"]
    assert rate["low"] < 0.5 < rate["high"]
    assert rate["n"] == 40
    assert figures["promoted_share"] < 0.001
    assert "In 10,000 simulated evaluations of equal policies, the gate promotes 0.0" in told
    kept = [json.loads(line) for line in (tmp_path / "outputs/judgements.jsonl").open()]
    assert sum(row["candidate"] != row["opponent"] for row in kept) > 20


@pytest.mark.parametrize(("name", "value"), [("temperature", "0"), ("top_k", "1")])
def test_a_model_against_itself_needs_sampled_answers(capsys, name: str, value: str):
    assert run("--against-itself", f"--{name.replace('_', '-')}", value) == 1
    assert f"{name}={value} makes them equal" in capsys.readouterr().err
