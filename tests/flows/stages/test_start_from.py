"""Reward model and critic start from those of the champion's run, once for each start."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.flow_run import SETTINGS_FILE, ChampionStart, FlowRun
from pipeline.inputs.lineage import is_origin
from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.replayed_pairs import trained_pairs
from pipeline.inputs.row_digests import ROWS_FILE, digest_of_row
from pipeline.inputs.run_data import RunData
from pipeline.launch.launcher import train
from pipeline.results.step_records import (
    FetchedChampion,
    PreparedModel,
    TrainedPolicy,
    ValidatedReward,
)
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages import ppo_training
from pipeline.stages.check import check_run
from pipeline.stages.ppo_training import _decides_the_result, train_policy
from pipeline.stages.sft_and_reward_models import load_reward_models
from pipeline.stages.start import start_run
from pipeline.tracking.mlflow_client import connect
from pipeline.tracking.mlflow_runs import find_runs
from pipeline.tracking.run_record import ENDED_EARLY, RECORD
from ppo_core.errors import TrainingError
from ppo_core.io.folder_cache import digest_of, digest_of_folder
from ppo_core.models.files.rollout_files import ROLLOUTS_FILE
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.runs.start_models import add_start, write_start

STEPS = ["load_reward_model", "train_policy"]
VALIDATION = ValidatedReward(
    fit=True, accepted_by_hand=False, reasons=[], bias=0.1, gain=1.0, report_file=""
)


def made(folder: Path, **changes: Any) -> Settings:
    return make_settings(tiny_table(folder) | {"start_from": "champion"} | changes, {})


@pytest.fixture
def settings(tmp_path: Path, mlflow_client) -> Settings:
    return made(tmp_path)


def sft_of(settings: Settings) -> PreparedModel:
    return PreparedModel(path=settings.policy, digest=digest_of_model(settings.policy), metrics={})


def begin(settings: Settings, number: int, version: int | None = None) -> FlowRun:
    champion = None if version is None else FetchedChampion(version=version, model="", tokenizer="")
    return start_run(settings, settings, "RLHF", str(number), STEPS, champion)


def train_all(settings: Settings, run: FlowRun) -> tuple[PreparedModel, TrainedPolicy]:
    sft = sft_of(settings)
    reward_model, _, _ = load_reward_models(settings, sft, run)
    return reward_model, train_policy(settings, sft, reward_model, VALIDATION, run)


def jobs_from_now(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of the jobs of PPO that are trained from now on."""
    jobs = []

    def noted(job: Path, **options: object) -> None:
        jobs.append(json.loads(job.read_text()))
        train(job, **options)

    monkeypatch.setattr(ppo_training, "train", noted)
    return jobs


@pytest.mark.slow
def test_a_second_week_starts_from_both_models_of_the_first(
    settings: Settings, tmp_path: Path, monkeypatch
):
    jobs = jobs_from_now(monkeypatch)
    first = begin(settings, 1)
    assert first.start is None and first.origin["start/version"] == "none"
    reward_model, policy = train_all(settings, first)
    assert policy.critic is not None
    assert policy.critic.digest == digest_of_folder(Path(policy.critic.path))
    assert (Path(policy.critic.path) / ROLLOUTS_FILE).is_file()
    assert not (first.folder / "ppo" / "critic").exists()

    start = tmp_path / "start"
    shutil.copytree(reward_model.path, start / "reward-model")
    shutil.copytree(policy.critic.path, start / "critic")
    version = add_start(settings, start)
    second = begin(settings, 2, version)
    assert second.start is not None
    assert second.origin["start/version"] == str(version)
    assert second.origin["start/manifest"] == second.start.digest
    assert not is_origin("start/version"), "a new champion alone would start a training"
    tags = connect().get_run(second.tracking["parent"]).data.tags
    assert tags["start/version"] == str(version)
    models = train_all(settings, second)
    assert models[0].path != reward_model.path
    # All pairs are old, and some of them train again.
    assert 0 < models[0].metrics["rows"] < reward_model.metrics["rows"]
    assert [job["critic_path"] for job in jobs] == [None, f"{second.start.path}/critic"]

    # What was made once is reused, and nothing is trained again.
    again = train_all(settings, begin(settings, 3, version))
    assert [one.path for one in again] == [one.path for one in models]
    assert again[1].critic == models[1].critic
    assert len(jobs) == 2


@pytest.mark.slow
def test_a_critic_that_is_gone_is_trained_again_and_the_policy_is_not(
    settings: Settings, monkeypatch
):
    """As after a kill between the two."""
    jobs = jobs_from_now(monkeypatch)
    run = begin(settings, 1)
    _, policy = train_all(settings, run)
    assert policy.critic is not None
    file = Path(policy.critic.path) / "model.safetensors"
    before = file.read_bytes()
    shutil.rmtree(file.parent)
    assert train_all(settings, run)[1].critic == policy.critic
    assert file.read_bytes() == before
    # PPO continued from its last checkpoint, so it trained nothing more.
    assert len(jobs) == 2


@pytest.mark.slow
def test_the_start_decides_the_policy(settings: Settings):
    def key(**start: Any) -> str:
        sft = sft_of(settings)
        return digest_of(_decides_the_result(RunData(settings), sft, sft, VALIDATION, **start))

    starts = [ChampionStart(version=1, path="", digest=digest) for digest in ("a", "b")]
    assert len({key(), *(key(start=start) for start in starts)}) == 3
    # The number of the version changes nothing.
    assert key(start=replace(starts[0], version=2)) == key(start=starts[0])


def test_the_rows_of_the_champions_run_are_rows_of_the_new_version(
    settings: Settings, tmp_path: Path
):
    version = add_start(settings, write_start(tmp_path / "start"))
    lines = Path(settings.preferences).read_text().splitlines(keepends=True)
    (tmp_path / "new.jsonl").write_text("".join(line.replace("w1 w1", "w5 w5") for line in lines))
    other = replace(settings, preferences=str(tmp_path / "new.jsonl"))
    run = begin(other, 2, version)
    from pyarrow import parquet

    pairs = trained_pairs(parquet.read_table(run.folder / ROWS_FILE, memory_map=False))
    for one in (settings, other):
        assert {digest_of_row(row) for row in RunData(one).training_pairs()} <= pairs


def test_check_says_where_the_models_would_start(settings: Settings, monkeypatch):
    monkeypatch.setattr("pipeline.stages.check.self_check", lambda settings: "")
    told = next(iter(check_run(settings)))
    assert told.startswith("start_from has no effect, because 'rlhf-policy' has no champion")


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2])
def test_adapters_and_members_continue_as_whole_models(tmp_path: Path, mlflow_client, members: int):
    adapter = {"r": 2, "alpha": 4}
    table = tiny_table(tmp_path)
    section = table["reward_model_training"] | {"lora": adapter, "members": members}
    settings = made(tmp_path, lora=adapter, reward_model_training=section)
    reward_model, policy = train_all(settings, begin(settings, 1))
    assert policy.critic is not None
    start = tmp_path / "start"
    shutil.copytree(reward_model.path, start / "reward-model")
    shutil.copytree(policy.critic.path, start / "critic")
    second = train_all(settings, begin(settings, 2, add_start(settings, start)))
    assert second[0].digest != reward_model.digest
    assert second[1].critic is not None and second[1].critic.digest != policy.critic.digest


@pytest.mark.slow
def test_machines_that_share_nothing_get_the_models_through_the_store(
    settings: Settings, store: str, tmp_path: Path
):
    version = add_start(settings, write_start(tmp_path / "start"))
    shared = replace(settings, store=f"{store}/starts")
    run = begin(shared, 1, version)
    assert run.start is not None and run.start.path.startswith("s3://")
    shutil.rmtree(Path(settings.output_dir) / "cache" / "starts")
    # Another machine has nothing of it, and knows only the record.
    elsewhere = replace(shared, output_dir=str(tmp_path / "elsewhere"))
    there = replace(run, workspace=replace(run.workspace, folder=elsewhere.output_dir))
    there.folder.mkdir(parents=True)
    reward_model, policy = train_all(elsewhere, there)
    assert reward_model.path.startswith("s3://")
    assert policy.critic is not None and policy.critic.path.startswith("s3://")


def test_a_first_step_that_fails_ends_its_runs(settings: Settings):
    folder = Path(settings.output_dir) / "runs" / "1"
    (folder / SETTINGS_FILE).mkdir(parents=True)
    with pytest.raises(TrainingError, match=f"{SETTINGS_FILE}' cannot be written"):
        begin(settings, 1)
    ended = {name: connect().get_run(run) for name, run in find_runs("RLHF/1").items()}
    statuses = {name: run.info.status for name, run in ended.items()}
    assert statuses == {"parent": "FAILED"} | dict.fromkeys(STEPS, "KILLED")
    assert ended["parent"].data.tags[ENDED_EARLY].startswith("start failed: ")
    # The next run does not take the run for a killed one.
    assert not (folder / RECORD).exists()
