"""Files of the records that a stage reads and returns, on machines that share no disk."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from metaflow import current

from pipeline.inputs.flow_run import FlowRun
from pipeline.promotion.register_and_decide import Candidate
from pipeline.results.step_records import (
    EvaluatedPolicy,
    PreparedModel,
    RewardRound,
    TrainedPolicy,
    ValidatedReward,
)
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import shared_journal, track, with_files
from pipeline.storage.workspace import Workspace
from pipeline.tracking.journal import Journal
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import free_port


@dataclass(frozen=True)
class Text:
    FILE_FIELDS: ClassVar = ("path",)
    path: str


def machine(root: Path, store: str) -> FlowRun:
    workspace = Workspace(str(root), store)
    return FlowRun(id="RLHF/1", workspace=workspace, tracking={}, origin={}, data=[])


@with_files()
def write(run: FlowRun, text: str) -> Text:
    path = run.folder / "text"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return Text(str(path))


@with_files("first")
def double(first: Text, second: Text | None, run: FlowRun) -> Text:
    assert second is None or second.path.startswith("s3://")
    return write(replace(run, id="RLHF/2"), 2 * Path(first.path).read_text())


@with_files("made")
def read(made: Text | None, run: FlowRun) -> str:
    return "" if made is None else Path(made.path).read_text()


def test_a_stage_reads_on_another_machine_what_a_stage_has_made(store: str, tmp_path: Path):
    first = write(machine(tmp_path / "a", f"{store}/stages"), text="ab")
    assert first.path.startswith(f"{store}/stages/runs/1/text")
    # Only what a stage reads is fetched, and its result is published, by position or by name.
    twice = double(first, first, run=machine(tmp_path / "b", f"{store}/stages"))
    assert twice.path.startswith(f"{store}/stages/runs/2/text")
    assert read(run=machine(tmp_path / "c", f"{store}/stages"), made=twice) == "abab"
    assert read(None, machine(tmp_path / "c", f"{store}/stages")) == ""


def test_a_registration_fetches_only_the_models_that_it_reads(store: str, tmp_path: Path):
    there, here = (machine(tmp_path / name, f"{store}/models") for name in "ab")

    def model(name: str) -> PreparedModel:
        path = there.folder / name / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(name)
        return PreparedModel(path=there.workspace.publish(path.parent), digest="", metrics={})

    policy = TrainedPolicy(
        path=model("policy").path,
        digest="",
        objective={},
        warnings=[],
        episodes_per_second=1.0,
        peak_rss_bytes=0,
        tokens_sampled=0,
        tokens_trained=0,
        self_check={},
        rounds=[RewardRound(number=2, path=model("round-2").path, digest="")],
    )
    candidate = Candidate(
        settings=Settings(task="tldr"),
        run=here,
        sft=model("sft"),
        reward_model=model("reward-model"),
        trained=policy,
        validation=ValidatedReward(
            fit=True, accepted_by_hand=False, reasons=[], bias=0.0, gain=1.0, report_file=""
        ),
        evaluation=EvaluatedPolicy(champion=None, kl=None, folder=model("evaluation").path),
    )

    def fetched() -> list[str]:
        return sorted(path.read_text() for path in tmp_path.joinpath("b").rglob("config.json"))

    candidate.fetched()
    assert fetched() == ["evaluation", "policy"]
    # The next run starts from the reward model and the critic.
    replace(candidate, trained=replace(policy, critic=model("critic"))).fetched()
    assert fetched() == ["critic", "evaluation", "policy", "reward-model"]


def test_on_one_disk_a_stage_gets_the_same_record(tmp_path: Path):
    run = machine(tmp_path, "")
    made = write(run, "ab")
    assert Path(made.path).is_relative_to(tmp_path)
    assert read(made, run) == "ab"


def test_a_retried_step_continues_while_mlflow_is_away(
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(type(current), "retry_count", 1)
    run = replace(machine(tmp_path, f"{store}/away"), tracking={"parent": "p", "load_policy": "l"})
    with (
        tracking_to(f"http://127.0.0.1:{free_port()}", retries=0),
        track(run, "load_policy", patient=True) as tracker,
    ):
        pass
    assert tracker.journal.status("l") == "FINISHED"
    assert "which metrics of the earlier attempt it has (API request" in capsys.readouterr().out


def test_a_run_that_returns_to_a_machine_continues_the_journal_of_the_other_one(
    store: str, tmp_path: Path
):
    """The folder on machine `a` still has the journal of the first attempt, which is older."""
    for name in ("a", "b", "a", "c"):
        run = machine(tmp_path / name, f"{store}/returned")
        with shared_journal(run):
            journal = Journal(run.folder)
            journal.set_tag("p", f"{journal.end()} bytes before", name)
    written = [entry["value"] for entry, _ in Journal(run.folder).unsent()]
    assert written == ["a", "b", "a", "c"]


def test_an_attempt_that_was_killed_leaves_its_entries_to_the_next_on_its_machine(
    store: str, tmp_path: Path
):
    run = machine(tmp_path / "a", f"{store}/killed")
    with shared_journal(run):
        Journal(run.folder).set_status("p", "RUNNING")
    # A killed attempt does not write its journal to S3.
    Journal(run.folder).set_status("p", "KILLED")
    with shared_journal(run):
        assert Journal(run.folder).status("p") == "KILLED"
