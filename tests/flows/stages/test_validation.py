"""The end of a run whose reward model was refused: what the user reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.inputs.flow_run import FlowRun
from pipeline.results.step_records import PreparedModel, ValidatedReward
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages import validation
from pipeline.stages.validation import stop_run
from pipeline.storage.workspace import Workspace
from ppo_core.errors import ModelError
from tests.helpers.runs.candidates import FIT

INPUTS = {
    "policy": "p",
    "preferences": "pairs.jsonl",
    "prompts": "train.jsonl",
    "eval_prompts": "test.jsonl",
    "judge": "python:judge.py:judge",
}


def refusal(folder: Path) -> str:
    """The message to a user whose run has this folder."""
    validation = ValidatedReward(
        fit=False,
        accepted_by_hand=False,
        reasons=["It repeats itself.", "It counts characters."],
        bias=0.0,
        gain=1.0,
        report_file=str(folder / "reward-model.json"),
    )
    run = FlowRun(id="RLHF/7", workspace=Workspace(str(folder)), tracking={}, origin={}, data=[])
    with pytest.raises(ModelError) as error:
        stop_run(validation, run)
    return str(error.value)


def test_each_block_of_samples_has_its_own_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seeds = []

    def answer(settings: Settings, policy: str, folder: Path, prompts: list[str]) -> list[str]:
        seeds.append(settings.seed)
        return prompts

    monkeypatch.setattr(validation, "answer_as_ppo", answer)
    model = PreparedModel(path="policy", digest="d", metrics={})
    draw = validation._draw(make_settings(INPUTS | {"seed": 2**32 - 4}, {}), model, tmp_path)
    for start in (0, 8):
        assert draw(["p", "q"], samples_per_prompt=2, start=start) == [["p", "p"], ["q", "q"]]
    assert seeds == [2**32 - 4, 4]


def test_the_message_has_the_reasons_the_report_and_the_next_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal(tmp_path / "my outputs" / "7")
    assert "- It repeats itself.\n- It counts characters.\n" in message
    assert "validate_reward_model), the file my outputs/7/reward-model.json, and" in message
    assert message.splitlines()[-1] == (
        "python flows/rlhf.py --config settings 'my outputs/7/runs/7/settings.toml' run "
        "--accept-reward-model"
    )
    # A resumed run would give a corrected model of the user the digest of the refused files.
    assert "and run again" in message and "resume" not in message


def test_a_report_outside_the_working_directory_has_its_full_path(tmp_path):
    assert f"{tmp_path / 'reward-model.json'}, and reward-model/report" in refusal(tmp_path)


def test_faults_of_a_reward_model_that_ppo_does_not_learn_from_end_no_run():
    unfit = replace(FIT, fit=False, reasons=["It guesses."])
    assert unfit.refused and not unfit.is_harmless
    unused = replace(unfit, is_used=False)
    assert unused.is_harmless and not unused.refused


@pytest.mark.parametrize(
    ("rewards", "weights", "is_used"),
    [
        ([], None, True),
        ([], [0.5], True),
        (["reward-model", "python:a.py:f"], None, True),
        (["python:a.py:f", "reward-model"], [1.0, -1.0], True),
        (["reward-model", "python:a.py:f"], [0.0, 1.0], False),
        (["python:a.py:f"], None, False),
        (["reward-model:other", "python:a.py:f"], None, False),
    ],
)
def test_ppo_learns_from_a_reward_model_that_is_listed_with_a_weight(rewards, weights, is_used):
    ppo = {"reward_weights": weights} if weights else {}
    settings = make_settings(INPUTS | {"rewards": rewards, "ppo": ppo}, {})
    assert settings.uses_reward_model == is_used
