"""The models that a run trains before PPO: the reward model, and the judge if none is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.labeled_pairs import label_pairs
from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.run_data import RunData
from pipeline.preflight.fetch_inputs import share_inputs
from pipeline.results.reward_report import RewardReport
from pipeline.results.step_records import PreparedModel
from pipeline.reward_validation.accuracy import measure_model
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages.ppo_training import train_policy
from pipeline.stages.sft_and_reward_models import load_policy, load_reward_models
from pipeline.stages.start import start_run
from pipeline.stages.validation import validate_reward_model
from pipeline.storage.addresses import is_in_s3
from pipeline.storage.workspace import Workspace
from ppo_core.models.loading import load_reward_model
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model

Models = tuple[PreparedModel, PreparedModel | None]


def bare(folder: Path, **changes: Any) -> Settings:
    """Settings without a judge."""
    return make_settings(tiny_table(folder) | {"judge": ""} | changes, {})


def prepared(path: str) -> PreparedModel:
    return PreparedModel(path=path, digest=digest_of_model(path), metrics={})


def load(settings: Settings, run: FlowRun) -> Models:
    sft = prepared(settings.policy)
    reward_model, judge, fresh = load_reward_models(settings, sft, run)
    assert fresh is None
    return reward_model, judge


@pytest.fixture
def start(mlflow_client) -> Callable[[Settings], FlowRun]:
    """Start a run of the steps that read or train models before PPO."""
    steps = ["load_policy", "load_reward_model", "validate_reward_model", "train_policy"]
    return lambda settings: start_run(settings, settings, "RLHF", "1", steps)


def encoded_rows(cache: Path) -> set[str]:
    return {path.name for path in (cache / "ppo_core").glob("*-tokens-*")}


@pytest.mark.slow
def test_members_are_trained_once_and_their_mean_is_validated_and_trains_the_policy(
    tmp_path: Path, start, capsys
):
    judge = f"python:{tmp_path / 'judge.py'}:judge"
    settings = bare(tmp_path, judge=judge, accept_reward_model=True)
    run = start(settings)
    alone, _ = load(settings, run)
    several = replace(
        settings, reward_model_training=replace(settings.reward_model_training, members=3)
    )
    capsys.readouterr()
    models, _ = load(several, run)
    # The first member is the reward model that was trained before, with the same digest.
    assert f"reward-model: reused {alone.path}" in capsys.readouterr().out
    folders = [Path(models.path, f"member-{number}") for number in (1, 2, 3)]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == Path(alone.path, "model.safetensors").read_bytes()
    assert len({*weights}) == 3
    # A restart trains none of them again.
    assert load(several, run) == (models, None)
    assert "training on" not in capsys.readouterr().out

    sft = prepared(several.policy)
    validation = validate_reward_model(several, sft, models, None, run)
    pairs = label_pairs(RunData(several).test_pairs())
    rate = measure_model(models.path, pairs, end_of_text=True, prompt_format="auto")
    assert validation.report().accuracy.accuracy == rate.accuracy
    trained = train_policy(several, sft, models, validation, run)
    assert trained.objective["rewards/disagreement"].last > 0


@pytest.mark.slow
def test_a_judge_is_trained_beside_the_reward_model_once(
    tmp_path: Path, start, capsys, monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path / "rows"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    # The largest seed: the judge is trained with the next one.
    settings = bare(tmp_path)
    last = replace(settings.reward_model_training, seed=2**32 - 1)
    settings = replace(settings, reward_model_training=last)
    data = RunData(settings)
    for encode in (data.encoded_demonstrations, data.encoded_pairs, data.encoded_judge_pairs):
        encode()
    encoded = encoded_rows(cache)
    assert len(encoded) == 3
    run = start(settings)
    reward_model, judge = load(settings, run)
    assert judge is not None
    assert "/cache/reward-model-" in reward_model.path and "/cache/judge-" in judge.path
    weights = [Path(one.path, "model.safetensors").read_bytes() for one in (reward_model, judge)]
    assert weights[0] != weights[1]
    # The processes of a training need no store: the step has fetched and encoded the rows.
    load_policy(settings, run)
    assert encoded_rows(cache) == encoded
    capsys.readouterr()
    assert load(settings, run) == (reward_model, judge)
    assert f"judge: reused {judge.path}" in capsys.readouterr().out
    # A named judge leaves all pairs to the reward model.
    alone, none = load(bare(tmp_path, judge="rule"), run)
    assert none is None
    assert alone.path != reward_model.path
    # The usable rows decide, and neither the limit of the others nor the file.
    with Path(settings.preferences).open("a") as file:
        file.write('{"prompt": "w1", "chosen": 7, "rejected": "w2"}\n')
    settings = replace(settings, max_left_out=0.1)
    assert load(settings, run) == (reward_model, judge)


@pytest.mark.slow
def test_the_judge_of_a_given_reward_model_is_trained_and_measured(tmp_path: Path, start, capsys):
    settings = bare(
        tmp_path,
        reward_model=write_model(tmp_path / "rm", labels=1),
        prompts=str(tmp_path / "eval.jsonl"),
    )
    run = start(settings)
    reward_model, judge = load(settings, run)
    assert judge is not None
    assert (reward_model.path, reward_model.metrics) == (settings.reward_model, {})
    assert reward_model.digest == digest_of_model(settings.reward_model)

    model, pairs = load_reward_model(judge.path), list(RunData(settings).judge_test_pairs())
    chosen, rejected = (
        model.score_texts([pair["prompt"] for pair in pairs], [pair[side] for pair in pairs])
        for side in ("chosen", "rejected")
    )
    sft = prepared(settings.policy)
    measured = validate_reward_model(settings, sft, reward_model, judge, run).judge
    assert measured is not None
    assert (measured.path, measured.n) == (judge.path, 6)
    assert measured.accuracy == pytest.approx((chosen > rejected).double().mean().item())
    told = capsys.readouterr().out
    assert f"The judge is right in {measured.accuracy:.1%} of 6 held-out pairs" in told
    assert ("The evaluation will be inconclusive." in told) == (measured.low <= 0.5)


COUNTING_JUDGE = """
from pathlib import Path

def judge(prompts, pairs):
    with (Path(__file__).parent / "asked.txt").open("a") as file:
        file.write("x" * len(pairs))
    return ["first" if len(one) > len(other) else "second" for one, other in pairs]
"""


def test_a_reward_model_is_measured_again_only_if_something_it_depends_on_changes(
    tmp_path: Path, start, capsys
):
    (tmp_path / "counting.py").write_text(COUNTING_JUDGE)
    settings = bare(
        tmp_path,
        judge=f"python:{tmp_path / 'counting.py'}:judge",
        reward_model=write_model(tmp_path / "rm", labels=1),
        accept_reward_model=True,
    )
    sft = prepared(settings.policy)
    given = prepared(settings.reward_model)
    run = start(settings)

    def measure(settings: Settings) -> tuple[RewardReport, int]:
        (tmp_path / "asked.txt").write_text("")
        report = validate_reward_model(settings, sft, given, None, run).report()
        return report, len((tmp_path / "asked.txt").read_text())

    first, asked = measure(settings)
    assert asked > 0
    other_ppo = replace(settings, ppo=replace(settings.ppo, kl_coef=0.5, learning_rate=1e-4))
    assert measure(other_ppo) == (first, 0)
    assert "reward-report: reused " in capsys.readouterr().out
    refusing = replace(settings, accept_reward_model=False)
    assert measure(refusing) == (replace(first, accepted_by_hand=False), 0)
    hotter = replace(settings, ppo=replace(settings.ppo, temperature=2.0))
    strict = replace(settings, reward_gate=replace(settings.reward_gate, num_prompts=2))
    (tmp_path / "counting.py").write_text(COUNTING_JUDGE + "# another version")
    assert [measure(each)[1] > 0 for each in (hotter, strict, settings)] == [True] * 3


def test_a_report_with_pairs_that_have_no_verdict_is_not_reused(tmp_path: Path, start):
    (tmp_path / "counting.py").write_text(COUNTING_JUDGE.replace('"first" if', '"invalid" if'))
    settings = bare(
        tmp_path,
        judge=f"python:{tmp_path / 'counting.py'}:judge",
        reward_model=write_model(tmp_path / "rm", labels=1),
        accept_reward_model=True,
    )
    sft = prepared(settings.policy)
    given = prepared(settings.reward_model)
    run, asked = start(settings), []
    for _ in range(2):
        (tmp_path / "asked.txt").write_text("")
        report = validate_reward_model(settings, sft, given, None, run).report()
        assert report.on_policy is not None and report.on_policy.invalid > 0
        asked.append(len((tmp_path / "asked.txt").read_text()))
    assert asked[0] == asked[1] > 0


@pytest.mark.slow
def test_on_machines_that_share_no_disk_a_step_fetches_what_it_reads(
    tmp_path: Path, start, store: str, mlflow_client
):
    settings = bare(tmp_path, store=f"{store}/run")
    run = start(settings)
    settings = share_inputs(settings, run)

    def machine(name: str) -> FlowRun:
        return replace(run, workspace=Workspace(str(tmp_path / name), settings.store))

    def models_on(name: str) -> int:
        return len([*(tmp_path / name).rglob("fetched/**/*.safetensors")])

    sft, _ = load_policy(settings, machine("a"))
    reward_model, judge, _ = load_reward_models(settings, sft, machine("b"))
    assert judge is not None
    assert all(is_in_s3(model.path) for model in (sft, reward_model, judge))
    assert load_reward_models(settings, sft, machine("c")) == (reward_model, judge, None)
    validation = validate_reward_model(settings, sft, reward_model, judge, machine("d"))
    assert validation.judge is not None and is_in_s3(validation.judge.path)
    trained = train_policy(settings, sft, reward_model, validation, machine("e"))
    assert is_in_s3(trained.path) and is_in_s3(validation.report_file)
    assert train_policy(settings, sft, reward_model, validation, machine("f")).path == trained.path
    # The policy; the policy after SFT, for a training or its key; all that is validated; the models
    # of PPO; and none, because the trained policy is reused.
    assert [models_on(name) for name in "abcdef"] == [1, 1, 1, 3, 2, 0]
