"""Feedback of users trains the reward model of a run, beside the given pairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.inputs.run_data import RunData
from pipeline.results.step_records import PreparedModel
from pipeline.reward_validation.accuracy import measure_model
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages.sft_and_reward_models import load_reward_models
from pipeline.stages.start import prepare_inputs, start_run
from ppo_core.errors import ConfigError, DataError
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_rows


def liked(number: int) -> dict[str, Any]:
    """Users like w50, and dislike w5; a third of the rows compare both."""
    good, bad = f"w50 w{number}", f"w5 w{number}"
    row = {"prompt": "w1", "chosen": None, "rejected": None, "annotator": "ann"}
    given = [{"chosen": good}, {"rejected": bad}, {"chosen": good, "rejected": bad}]
    return row | given[number % 3]


def with_feedback(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings whose given pairs prefer what users dislike."""
    table = tiny_table(folder) | {"sft_data": ""}
    pairs = [{"prompt": "w1", "chosen": f"w5 w{i}", "rejected": f"w50 w{i}"} for i in range(40)]
    table["preferences"] = write_rows(folder / "opposite.jsonl", pairs)
    table["feedback"] = write_rows(folder / "feedback.jsonl", [liked(n) for n in range(90)])
    training = {"num_epochs": 6, "batch_size": 16, "max_length": 32, "learning_rate": 3e-3}
    return table | {"reward_model_training": training} | changes


@pytest.fixture
def start(mlflow_client) -> Callable[[Settings], FlowRun]:
    steps = ["load_policy", "load_reward_model"]
    return lambda settings: start_run(settings, settings, "RLHF", "1", steps)


@pytest.mark.slow
def test_feedback_outweighs_given_pairs_by_its_weight(tmp_path: Path, start):
    rates, run = [], start(make_settings(with_feedback(tmp_path), {}))
    for weight in (0.001, 5.0):
        settings = make_settings(with_feedback(tmp_path, feedback_weight=weight), {})
        sft = PreparedModel(path=settings.policy, digest="", metrics={})
        model, _, _ = load_reward_models(settings, sft, run)
        # Words that no row of the feedback has.
        users = [
            LabeledPair(prompt="w1", chosen=f"w50 w{n}", rejected=f"w5 w{n}") for n in range(92, 96)
        ]
        rates.append(measure_model(model.path, users, end_of_text=True, prompt_format="text"))
    assert [rate.accuracy for rate in rates] == [0.0, 1.0]


def test_feedback_is_a_data_set_of_the_run(tmp_path: Path, mlflow_client, capsys):
    settings = make_settings(with_feedback(tmp_path), {})
    prepare_inputs(settings)
    told = capsys.readouterr().out
    # Row 38 compares a pair that is held out to validate the reward model.
    assert "/feedback.jsonl: 89 rows" in told
    data = RunData(settings)
    assert {"feedback", "preferences"} <= data.by_use().keys()
    given, read = data.digested()["feedback"]
    assert (len(given), len(read)) == (90, 89)
    assert len(data.reward_training_pairs()) == len(data.training_pairs()) + 89
    # Erased like any other row.
    gone = [{"prompt": "w1", "chosen": "w50 w0"}]
    erasing = make_settings(
        with_feedback(tmp_path) | {"erase": write_rows(tmp_path / "gone.jsonl", gone)}, {}
    )
    feedback = RunData(erasing).feedback()
    assert feedback is not None
    assert len(feedback) == 88


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "w1"}, "without a response in chosen or rejected"),
        ({"prompt": "w1", "chosen": 3}, "chosen"),
        ({"prompt": "w1", "chosen": "w2", "weight": -1}, "with a weight below 0"),
        ({"prompt": "w1", "chosen": "w2", "weight": "much"}, "without a finite number in weight"),
    ],
)
def test_rows_that_are_no_feedback_are_refused(
    tmp_path: Path, mlflow_client, row: dict[str, Any], reason: str
):
    rows = [liked(0), {**liked(0), "weight": 1}, row]
    table = with_feedback(tmp_path) | {"feedback": write_rows(tmp_path / "bad.jsonl", rows)}
    with pytest.raises(DataError, match=reason):
        prepare_inputs(make_settings(table, {}))


def test_feedback_without_a_training_is_refused(tmp_path: Path):
    table = with_feedback(tmp_path) | {"reward_model": "a-model"}
    with pytest.raises(ConfigError, match=r"feedback='.*' would be ignored, because reward_model="):
        make_settings(table, {})
