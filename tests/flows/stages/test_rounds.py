"""Rounds: PPO pauses, pairs of its samples are labeled, and a new reward model takes over."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.run_data import RunData
from pipeline.judges.judge_budget import Spent
from pipeline.results.step_records import FreshPairs, PreparedModel, TrainedPolicy, ValidatedReward
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages import rounds
from pipeline.stages.ppo_training import _decides_the_result, train_policy
from pipeline.stages.rounds import Rounds, ScaledReward, rescaled
from pipeline.stages.start import prepare_inputs, start_run
from pipeline.storage.workspace import Workspace
from pipeline.tracking.tracker import Tracker
from ppo_core.errors import ConfigError, DataError
from ppo_core.io.folder_cache import digest_of
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model, write_rows

LABELLER = """
from pathlib import Path

def low(prompts, pairs):
    if Path(__file__).with_name("dead").exists():
        raise RuntimeError("half-way")
    with Path(__file__).with_suffix(".asked").open("a") as asked:
        asked.writelines(f"{prompt}\\n" for prompt in prompts)
    points = [[sum(int(word[1:]) for word in text.split()) for text in pair] for pair in pairs]
    return ["first" if a < b else "second" if b < a else "tie" for a, b in points]

def undecided(prompts, pairs):
    return ["tie" for _ in pairs]
"""
MODEL = PreparedModel(path="", digest="", metrics={})
VALIDATION = ValidatedReward(
    fit=True, accepted_by_hand=False, reasons=[], bias=0.1, gain=1.0, report_file=""
)
UPDATES = 4


def table_of(folder: Path, labeller: str = "low", **changes: Any) -> dict[str, Any]:
    """Settings of a run with two rounds of 40 pairs, and four updates of PPO."""
    folder.mkdir(exist_ok=True)
    table = tiny_table(folder)
    (folder / "labeller.py").write_text(LABELLER)
    prompts = [{"prompt": f"w{number} w2 w3"} for number in range(40)]
    pairs = {"count": 80, "labeller": f"python:{folder / 'labeller.py'}:{labeller}", "rounds": 2}
    return table | {
        "sft_data": "",
        "prompts": write_rows(folder / "many.jsonl", prompts),
        "fresh_pairs": pairs | changes,
        "ppo": table["ppo"] | {"total_episodes": 8 * UPDATES},
    }


@pytest.fixture
def begin(mlflow_client) -> Callable[[Settings], tuple[FlowRun, list[Any]]]:
    """Start a run; return it with its models, and the pairs of the first round."""

    def begun(settings: Settings, number: int = 1) -> tuple[FlowRun, list[Any]]:
        folder = Path(settings.output_dir).parent
        paths = write_model(folder / "sft"), write_model(folder / "reward", labels=1)
        models = [PreparedModel(path=p, digest=digest_of_model(p), metrics={}) for p in paths]
        rows = [
            {"prompt": f"w{number}", "chosen": f"w{number % 9} w1", "rejected": f"w50 w{number}"}
            for number in range(40)
        ]
        pairs = folder / "fresh-pairs-0"
        pairs.mkdir(exist_ok=True)
        write_rows(pairs / "pairs.jsonl", rows)
        run = start_run(settings, settings, "RLHF", str(number), ["train_policy"])
        return run, [*models, VALIDATION, FreshPairs(path=str(pairs), spent={})]

    return begun


def train(settings: Settings, run: FlowRun, given: list[Any]) -> TrainedPolicy:
    *models, fresh = given
    return train_policy(settings, *models, run, fresh=fresh)


def curve(client, run: FlowRun, metric: str) -> list[tuple[int, float]]:
    history = client.get_metric_history(run.tracking["parent"], metric)
    return [(point.step, point.value) for point in history]


@pytest.mark.slow
def test_a_pause_without_new_pairs_changes_no_weight_and_no_metric(tmp_path: Path, begin, capsys):
    settings = make_settings(table_of(tmp_path / "two", "undecided"), {})
    run, given = begin(settings)
    paused = train(settings, run, given)
    assert "round 2: the reward model stays" in capsys.readouterr().out
    once = make_settings(table_of(tmp_path / "one", "undecided", rounds=1), {})
    run, given = begin(once, 2)
    trained = train(once, run, given)
    assert paused.digest == trained.digest
    assert paused.rounds == []
    same = ("objective/kl", "loss/value_avg", "lr", "objective/scores", "episode")
    assert {name: paused.objective[name] for name in same} == {
        name: trained.objective[name] for name in same
    }


def test_labels_that_are_too_few_are_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spent = {"openai:m": Spent(calls=80, tokens=900)}
    labeled = FreshPairs(path="second", spent=spent)
    monkeypatch.setattr(rounds, "label_round", lambda *_, **__: (labeled, False))
    settings = make_settings(table_of(tmp_path / "run"), {})
    parts: list[Any] = []
    begun = Rounds(
        tracker=cast("Tracker", None),
        data=RunData(settings),
        run=FlowRun(
            id="RLHF/1", workspace=Workspace(str(tmp_path)), tracking={}, origin={}, data=[]
        ),
        sft=MODEL,
        policy=MODEL,
        updates=0,
        train_part=lambda reward, pause: parts.append(pause.after_updates),
    )
    first = ScaledReward(model=MODEL, bias=0.0, gain=1.0)
    assert begun.train(first, FreshPairs(path="first", spent={})) == ([], spent)
    assert parts == [0]


@pytest.mark.slow
def test_ppo_continues_with_a_reward_model_of_the_pairs_of_all_rounds(
    tmp_path: Path, begin, mlflow_client, capsys
):
    settings = make_settings(table_of(tmp_path / "run"), {})
    run, given = begin(settings)
    trained = train(settings, run, given)
    told = capsys.readouterr().out
    assert "round-2/fresh-reward-model: right in" in told
    (second,) = trained.rounds
    assert second.number == 2
    assert Path(second.path).name.startswith("fresh-reward-model-")
    # The prompts of the second round are those that the first round did not use.
    data = RunData(settings)
    prompts = {*(tmp_path / "run" / "labeller.asked").read_text().splitlines()}
    assert prompts <= {*data.fresh_prompts(2)}
    assert not {*data.fresh_prompts(1)} & {*data.fresh_prompts(2)}
    # Episodes, learning rate and divergence from SFT go on over the pause.
    episodes = curve(mlflow_client, run, "episode")
    assert [value for _, value in episodes] == [8.0 * n for n in range(1, UPDATES + 1)]
    rates = [value for _, value in curve(mlflow_client, run, "lr")]
    assert rates == pytest.approx([rates[0] * (1 - n / UPDATES) for n in range(UPDATES)])
    # The same run again trains nothing, and keeps what it knows of its rounds.
    asked = (tmp_path / "run" / "labeller.asked").read_text()
    assert train(settings, run, given) == trained
    assert (tmp_path / "run" / "labeller.asked").read_text() == asked


@pytest.mark.slow
def test_a_labeller_that_dies_in_the_pause_costs_no_update_and_no_label(
    tmp_path: Path, begin, capfd
):
    whole = make_settings(table_of(tmp_path / "whole"), {})
    expected = train(whole, *begin(whole))
    settings = make_settings(table_of(tmp_path / "killed"), {})
    run, given = begin(settings, 2)
    dead = tmp_path / "killed" / "dead"
    dead.touch()
    with pytest.raises(DataError, match="half-way"):
        train(settings, run, given)
    assert (run.folder / "ppo" / f"checkpoint-{UPDATES // 2}").is_dir()
    dead.unlink()
    capfd.readouterr()
    assert train(settings, run, given).digest == expected.digest
    assert f"{UPDATES // 2} updates are done" in capfd.readouterr().err


def test_a_reward_model_takes_over_with_the_mean_and_the_deviation_of_before():
    old = ScaledReward(model=MODEL, bias=1.0, gain=0.5)
    # Rewards before: 0.5 * ([1, 3] - 1) = [0, 1], mean 0.5, deviation 0.5.
    before, after = np.array([1.0, 3.0]), np.array([30.0, 10.0])
    new = rescaled(old, MODEL, before, after)
    # A deviation of 10 becomes 0.5 with a gain of 0.05, and the mean of 20 becomes 0.5 at a bias
    # of 20 - 0.5 / 0.05 = 10.
    assert (new.gain, new.bias) == pytest.approx((0.05, 10.0))
    assert (new.gain * (after - new.bias)).tolist() == pytest.approx([1.0, 0.0])
    flat = rescaled(old, MODEL, before, np.array([5.0, 5.0]))
    assert flat.gain == 0.5
    assert flat.gain * (5.0 - flat.bias) == pytest.approx(0.5)


@pytest.mark.slow
def test_what_decides_the_rounds_trains_another_policy(tmp_path: Path, begin):
    settings = make_settings(table_of(tmp_path / "run"), {})
    _, given = begin(settings)

    def key(fresh: FreshPairs = given[-1], **changes: Any) -> str:
        changed = replace(settings, fresh_pairs=replace(settings.fresh_pairs, **changes))
        return digest_of(_decides_the_result(RunData(changed), *given[:3], fresh))

    others = [
        key(rounds=1),
        key(rounds=3),
        key(given_weight=0.5),
        key(fresh=FreshPairs(path="/cache/fresh-pairs-1", spent={})),
    ]
    assert len({key(), *others}) == 1 + len(others)
    # With one round, the policy depends on the reward model, and not on its pairs.
    assert key(rounds=1) == key(rounds=1, given_weight=0.5)


def test_more_rounds_than_updates_are_found_before_any_training(tmp_path: Path):
    settings = make_settings(table_of(tmp_path / "run", count=100, rounds=5), {})
    with pytest.raises(ConfigError, match="rounds=5 are more than the 4 updates of PPO"):
        prepare_inputs(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": 2}, "pauses PPO on one machine only"),
        ({"rewards": ["python:reward.py:f"]}, "from which PPO does not learn"),
    ],
)
def test_rounds_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    table = table_of(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        make_settings(table | changes, {})


def test_pairs_of_later_rounds_are_no_pairs_of_the_first(tmp_path: Path, begin):
    settings = make_settings(table_of(tmp_path / "run", count=100), {})
    data = RunData(settings)
    first, second = data.fresh_prompts(1), data.fresh_prompts(2)
    once = RunData(make_settings(table_of(tmp_path / "run", count=100, rounds=1), {}))
    assert first + second == once.fresh_prompts()
    assert (len(first), len(second)) == (50, 50)
