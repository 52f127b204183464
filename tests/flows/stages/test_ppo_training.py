"""PPO of a run: made once for equal inputs, so a run that failed later does not pay again."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.run_data import RunData
from pipeline.launch.launcher import train
from pipeline.results.step_records import PreparedModel, ValidatedReward
from pipeline.settings.evaluation_config import SelectionConfig
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import LoraConfig
from pipeline.stages import ppo_training
from pipeline.stages.ppo_training import _decides_the_result, train_policy
from pipeline.stages.start import start_run
from ppo_core.checkpointing.folders import saved_policies
from ppo_core.errors import ModelError
from ppo_core.io.folder_cache import digest_of, digest_of_folder
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model
from tests.helpers.slow_cases import slow

VALIDATION = ValidatedReward(
    fit=True, accepted_by_hand=False, reasons=[], bias=0.123456, gain=1.0, report_file=""
)
UPDATES = 3


@pytest.fixture
def settings(tmp_path: Path, mlflow_client) -> Settings:
    return make_settings(tiny_table(tmp_path), {})


@pytest.fixture
def models(tmp_path: Path) -> tuple[PreparedModel, PreparedModel]:
    paths = write_model(tmp_path / "sft"), write_model(tmp_path / "reward", labels=1)
    sft, reward = (
        PreparedModel(path=each, digest=digest_of_model(each), metrics={}) for each in paths
    )
    return sft, reward


def begin(settings: Settings, number: int) -> FlowRun:
    return start_run(settings, settings, "RLHF", str(number), ["train_policy"])


def curve(client, run: FlowRun) -> list[tuple[int, float]]:
    history = client.get_metric_history(run.tracking["parent"], "objective/kl")
    return [(point.step, point.value) for point in history]


@pytest.mark.parametrize("changed", [0, 1])
def test_a_model_that_was_changed_after_the_run_read_it_is_not_trained_with(
    settings, models, changed: int
):
    config = Path(models[changed].path, "config.json")
    config.write_text(config.read_text() + "\n")
    with pytest.raises(ModelError, match=f"{config.parent}' was changed after this run read it"):
        train_policy(settings, *models, VALIDATION, begin(settings, 1))


@pytest.mark.slow
def test_a_later_run_reuses_the_policy_and_has_its_curve(settings, models, mlflow_client, capsys):
    runs = [begin(settings, number) for number in (1, 2)]
    first, second = (train_policy(settings, *models, VALIDATION, run) for run in runs)
    assert second == replace(first, tokens_sampled=0, tokens_trained=0)
    assert first.tokens_sampled > 0
    said = capsys.readouterr().out
    assert f"policy: made {first.path}" in said and f"policy: reused {first.path}" in said
    assert len(curve(mlflow_client, runs[0])) == UPDATES
    assert curve(mlflow_client, runs[0]) == curve(mlflow_client, runs[1])
    tags = [mlflow_client.get_run(run.tracking["train_policy"]).data.tags for run in runs]
    assert [each["reused"] for each in tags] == ["False", "True"]


@pytest.mark.slow
def test_a_run_that_was_killed_after_its_training_counts_its_tokens(settings, models):
    run = begin(settings, 1)
    first, again = (train_policy(settings, *models, VALIDATION, run) for _ in range(2))
    assert again == first


@pytest.mark.slow
def test_whatever_decides_the_policy_trains_another_one(settings, models):
    sft, reward_model = models

    def key(
        changed: Settings = settings,
        validation: ValidatedReward = VALIDATION,
        policy: PreparedModel = sft,
        reward: PreparedModel = reward_model,
    ) -> str:
        return digest_of(_decides_the_result(RunData(changed), policy, reward, validation))

    def with_ppo(**changes: object) -> Settings:
        return replace(settings, ppo=replace(settings.ppo, **changes))

    fewer = first_prompts(settings, lines=20)
    others = [
        key(with_ppo(kl_coef=0.5)),
        key(with_ppo(total_episodes=8)),
        key(with_ppo(batch_size=16)),
        key(with_ppo(seed=7)),
        key(replace(settings, prompt_format="text")),
        key(replace(settings, prompts=fewer)),
        key(replace(settings, lora=LoraConfig(r=2))),
        key(validation=replace(VALIDATION, bias=0.2)),
        key(validation=replace(VALIDATION, gain=2.0)),
        key(replace(settings, rewards=["reward-model"])),
        key(policy=replace(sft, digest="other")),
        key(reward=replace(reward_model, digest="other")),
    ]
    assert len({key(), *others}) == 1 + len(others)
    # Rounding of the bias on another machine, and settings that change no update.
    assert key(validation=replace(VALIDATION, bias=0.12345599)) == key()
    assert key(with_ppo(warn_kl=3.0, save_steps=1, logging_steps=1)) == key()
    assert key(replace(settings, processes=2)) == key()
    # Without a size of the batch, it follows from the processes.
    spread = with_ppo(batch_size=None)
    assert key(replace(spread, processes=2)) != key(replace(spread, processes=1))


@pytest.fixture
def keeping(settings: Settings) -> Settings:
    """The same run, which keeps the policies after the first and the second update."""
    return replace(
        settings,
        ppo=replace(settings.ppo, save_policies=2),
        selection=SelectionConfig(method="judge"),
    )


def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The jobs that are trained from now on."""
    jobs = []

    def noted(job: Path, **options: object) -> None:
        jobs.append(job)
        train(job, **options)

    monkeypatch.setattr(ppo_training, "train", noted)
    return jobs


@pytest.mark.slow
def test_earlier_policies_are_made_once_and_leave_the_folder_of_the_run(
    settings, keeping, models, monkeypatch
):
    jobs = trainings(monkeypatch)
    runs = [begin(keeping, number) for number in (1, 2, 3)]
    first, second = (train_policy(keeping, *models, VALIDATION, run) for run in runs[:2])
    assert second == replace(first, tokens_sampled=0, tokens_trained=0)
    assert len(jobs) == 1
    folder = Path(first.earlier.path)
    assert [*saved_policies(folder)] == [1, 2]
    assert first.earlier.digest == digest_of_folder(folder)
    digests = {digest_of_folder(each) for each in saved_policies(folder).values()}
    assert len({*digests, first.digest}) == 3
    assert not (runs[0].folder / "ppo" / "policies").exists()
    assert not (runs[0].folder / "policy").exists()
    # A run that keeps none uses the same last policy.
    plain = train_policy(settings, *models, VALIDATION, runs[2])
    assert plain == replace(second, earlier=None)
    assert len(jobs) == 1


@pytest.mark.slow
def test_earlier_policies_of_a_cached_policy_are_trained_and_paid_for(
    settings, keeping, models, monkeypatch, mlflow_client
):
    jobs = trainings(monkeypatch)
    runs = [begin(settings, 1), begin(keeping, 2)]
    first = train_policy(settings, *models, VALIDATION, runs[0])
    assert first.earlier is None
    second = train_policy(keeping, *models, VALIDATION, runs[1])
    assert second == replace(first, earlier=second.earlier)
    assert [*saved_policies(Path(second.earlier.path))] == [1, 2]
    assert len(jobs) == 2
    assert curve(mlflow_client, runs[0]) == curve(mlflow_client, runs[1])


class KilledError(Exception):
    """Stands for a kill of the process."""


@pytest.mark.parametrize("place", slow("before", "while"))
def test_a_run_that_is_killed_after_its_ppo_has_all_earlier_policies(
    place: str, keeping, models, monkeypatch
):
    """Killed before or while the policies are copied, with the last policy in the cache."""
    run, copytree = begin(keeping, 1), shutil.copytree

    def killed(source: Path, target: Path, **options: object) -> None:
        if place == "while":
            copytree(source / "1", target / "1")
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(ppo_training.shutil, "copytree", killed)
        with pytest.raises(KilledError):
            train_policy(keeping, *models, VALIDATION, run)
    trained = train_policy(keeping, *models, VALIDATION, run)
    assert [*saved_policies(Path(trained.earlier.path))] == [1, 2]
    assert trained.tokens_sampled > 0
    assert not (run.folder / "ppo" / "policies").exists()


@pytest.mark.slow
def test_earlier_policies_go_to_machines_that_share_nothing(
    keeping, models, store, tmp_path, monkeypatch
):
    """The next step finds them by their address, and so does a later run on another machine."""
    shared = replace(keeping, store=f"{store}/rlhf")
    trained = train_policy(shared, *models, VALIDATION, begin(shared, 1))
    assert trained.earlier.path.startswith("s3://")
    jobs = trainings(monkeypatch)
    elsewhere = replace(shared, output_dir=str(tmp_path / "elsewhere"))
    again = train_policy(elsewhere, *models, VALIDATION, run := begin(elsewhere, 2))
    assert (again.earlier, jobs) == (trained.earlier, [])
    here = run.workspace.fetch_files(again)
    assert [*saved_policies(Path(here.earlier.path))] == [1, 2]
    assert here.earlier.digest == digest_of_folder(Path(here.earlier.path))
    assert run.workspace.publish_files(here) == again


def first_prompts(settings: Settings, lines: int) -> str:
    """A file with the first prompts of the run."""
    path = Path(settings.output_dir).parent / "fewer.jsonl"
    path.write_text("".join(Path(settings.prompts).read_text().splitlines(keepends=True)[:lines]))
    return str(path)
