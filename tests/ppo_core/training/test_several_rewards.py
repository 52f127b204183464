"""Rewards in a run: columns of the prompts' rows, scales of their own, and monitors."""

import dataclasses
import json
import math
import os
import signal

import pytest
import torch
from torch.testing import assert_close

from ppo_core.checkpointing.read_checkpoint import read_newest
from ppo_core.errors import ConfigError, RunInterruptedError, TrainingError
from ppo_core.models.loading import load_policy, load_reward_model, member_folders
from ppo_core.models.reward_model import RewardModel
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.models.tiny import make_classifier, make_tokenizer
from tests.helpers.runs.forked_python import run_python
from tests.helpers.slow_cases import slow
from tests.ppo_core.distributed.test_interruption import everything, without_clocks
from tests.ppo_core.training.test_trainer import CLOCKS, CONFIG, PROMPTS, make_trainer, weights

ROWS = [{"prompt": prompt, "number": n, "best": f"w{n}"} for n, prompt in enumerate(PROMPTS)]


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response.split())) for response in responses]


def thousand(prompts: list[str], responses: list[str]) -> list[float]:
    return [1000.0 * ("w1 " in response) for response in responses]


def infinite(prompts: list[str], responses: list[str]) -> list[float]:
    return [math.inf] * len(responses)


# --- The mean of several reward models ---


def test_a_folder_of_reward_models_scores_with_their_mean_and_logs_how_far_they_differ(tmp_path):
    folder, tokenizer = tmp_path / "rewards", make_tokenizer()
    for number in (2, 3, 1):
        make_classifier(seed=number).save_pretrained(folder / f"member-{number}")
        tokenizer.save_pretrained(folder / f"member-{number}")
    assert [one.name for one in member_folders(folder)] == ["member-1", "member-2", "member-3"]
    assert member_folders(folder / "member-1") == member_folders("org/model") == []

    ensemble = load_reward_model(folder, bias=0.5, gain=2.0)
    texts = (["w1 w2", "w3"], ["w4", "w5 w6 w7"])
    singles = [load_reward_model(one).score_texts(*texts) for one in member_folders(folder)]
    each = 2 * (torch.stack(singles) - 0.5)
    assert_close(ensemble.score_texts(*texts), each.mean(dim=0))
    assert not torch.allclose(each[0], each[1])

    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path / "ppo"))
    trainer = make_trainer(config, reward_model={"mean": ensemble, "length": length})
    rewards = trainer.rewards
    assert [one.model for one in rewards.models()] == [one.model for one in ensemble.members]
    metrics = trainer.train()[-1]
    assert metrics["rewards/disagreement"] > 0
    # The disagreement is not a reward, and the critic begins as the first member.
    parts = {"mean": torch.ones(2), "length": torch.ones(2), "disagreement": torch.full((2,), 9.0)}
    assert rewards.total(parts).tolist() == [2.0, 2.0]
    assert rewards.models(weighted=True)[0] is ensemble.members[0]

    two = {"a": ensemble, "b": ensemble}
    metrics = make_trainer(config, reward_model=two).train()[-1]
    assert metrics["rewards/disagreement_a"] == metrics["rewards/disagreement_b"] > 0
    for named in ({"disagreement": length, "a": ensemble}, {"disagreement_b": length, **two}):
        with pytest.raises(ConfigError, match=rf"A reward has the name '{next(iter(named))}'"):
            make_trainer(config, reward_model=named)


# --- Columns ---


def test_each_response_gets_the_columns_of_its_prompts_row(tmp_path):
    seen = []

    def reward(prompts, responses, number, **columns):
        assert columns.keys() == {"prompt", "best"}
        assert len(prompts) == len(responses) == len(number) == len(columns["best"])
        seen.extend(zip(prompts, number, columns["best"], strict=True))
        number.clear()  # It is the function's own list.
        return length(prompts, responses)

    def other(prompts, responses, number):
        return [float(each) for each in number]

    config = dataclasses.replace(
        CONFIG, eval_strategy="steps", eval_steps=1, output_dir=str(tmp_path)
    )
    trainer = make_trainer(
        config, prompts=ROWS, eval_dataset=ROWS[:10], reward_model=[reward, other]
    )
    metrics = trainer.train()
    assert len(seen) > 32 and all(
        (prompt, best) == (PROMPTS[n], f"w{n}") for prompt, n, best in seen
    )
    assert metrics[0]["rewards/other"] > 0
    trainer.generate_completions(sampling=True)
    assert seen[-1][1] == 7  # The first rows alone: per_device_eval_batch_size is 8.
    trainer.evaluate([{"prompt": "w3", "number": 39, "best": "w39"}])


def test_a_misspelt_column_ends_the_run_before_it_trains():
    def reward(prompts, responses, numbre):
        raise AssertionError("called")

    with pytest.raises(ConfigError, match=r"reward needs the column 'numbre'.*number\?"):
        make_trainer(prompts=ROWS, reward_model=reward)

    def other(prompts, responses, number):
        return length(prompts, responses)

    with pytest.raises(ConfigError, match="other needs the column 'number'"):
        make_trainer(prompts=ROWS, eval_dataset=PROMPTS[:3], reward_model=other)


def test_columns_that_the_reward_takes_belong_to_the_run(tmp_path):
    def reward(prompts, responses, number):
        return [float(each) for each in number]

    config = dataclasses.replace(
        CONFIG, output_dir=str(tmp_path), save_strategy="steps", save_steps=1
    )
    make_trainer(config, prompts=ROWS, reward_model=reward).train()
    changed = [{**row, "number": 7} for row in ROWS]
    with pytest.raises(TrainingError, match="prompts="):
        make_trainer(config, prompts=changed, reward_model=reward).train(True)


# --- Each by its own scale ---

SCALED = dataclasses.replace(
    CONFIG, scale_each_reward=True, missing_eos_penalty=None, total_episodes=48, save_steps=1
)


def test_a_reward_a_thousand_times_larger_counts_like_the_other():
    config = dataclasses.replace(SCALED, reward_weights=[1.0, 1.0])
    metrics = make_trainer(config, reward_model=[length, thousand]).step()

    def parts_of(scale: float) -> list[torch.Tensor]:
        def large(prompts, responses):
            return [scale * each for each in length(prompts, responses)]

        trainer = make_trainer(SCALED, reward_model=[large, thousand])
        trainer.train()
        return list(weights(trainer).values())

    # Rounding aside, the scale of a reward changes nothing.
    for one, other in zip(parts_of(1.0), parts_of(1024.0), strict=True):
        assert_close(one, other)
    # Means of the rewards are logged as they are.
    assert metrics["rewards/thousand"] in [1000 * n / 16 for n in range(17)]
    assert abs(metrics["objective/scores"]) < 20


def small(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(response.split().count("w1")) for response in responses]


def large(prompts: list[str], responses: list[str]) -> list[float]:
    return [1000.0 * response.split().count("w2") for response in responses]


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_the_policy_learns_both_of_two_rewards_only_if_each_is_scaled(scaled: bool):
    """Seeds 1, 2 and 3: from 0.2 to 3.4, 5.5 and 4.3 of `w1` scaled, and to below 0.1 unscaled."""
    config = dataclasses.replace(
        CONFIG,
        scale_each_reward=scaled,
        total_episodes=32 * 40,
        batch_size=32,
        per_device_train_batch_size=32,
        whiten_rewards=False,
        missing_eos_penalty=None,
        learning_rate=3e-3,
        seed=1,
    )
    last = make_trainer(config, reward_model=[small, large]).train()[-5:]
    found, other = (
        sum(update[f"rewards/{name}"] for update in last) / 5 for name in ("small", "large")
    )
    assert other > 1000
    assert found > 1 if scaled else found < 0.2


def test_the_deviations_are_those_of_all_scores_so_far():
    seen = {"length": [], "thousand": []}

    def kept(function):
        def reward(prompts, responses):
            seen[function.__name__] += (scores := function(prompts, responses))
            return scores

        reward.__name__ = function.__name__
        return reward

    config = dataclasses.replace(SCALED, reward_weights=[2.0, -1.0])
    trainer = make_trainer(config, reward_model=[kept(length), kept(thousand)])
    for _ in range(3):
        metrics = trainer.step()
        deviations = {name: torch.tensor(scores).double().std() for name, scores in seen.items()}
        last = {name: torch.tensor(scores[-16:]).mean() for name, scores in seen.items()}
        expected = 2 * last["length"] / deviations["length"]
        expected -= last["thousand"] / deviations["thousand"]
        assert metrics["objective/scores"] == pytest.approx(float(expected), rel=1e-5)
    # Evaluations divide by the same deviations, and teach them nothing.
    counts = [moments.count for moments in trainer._run.reward_moments.values()]
    found = trainer.evaluate(PROMPTS[:4])["eval/scores"]
    last = {name: torch.tensor(scores[-4:]).mean() for name, scores in seen.items()}
    expected = 2 * last["length"] / deviations["length"]
    expected -= last["thousand"] / deviations["thousand"]
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert counts == [moments.count for moments in trainer._run.reward_moments.values()] == [48, 48]


@pytest.mark.slow
def test_a_resumed_run_scales_as_if_it_had_never_stopped(tmp_path):
    config = dataclasses.replace(SCALED, save_strategy="steps", output_dir=str(tmp_path))
    whole, resumed = (make_trainer(config, reward_model=[length, thousand]) for _ in range(2))
    history = whole.train()
    again = resumed.train(tmp_path / "checkpoint-2")
    assert without_clocks(again) == without_clocks(history)[2:]
    assert everything(resumed) == everything(whole)


@pytest.mark.slow
def test_a_run_that_was_stopped_while_it_scored_scales_as_if_it_had_not(tmp_path):
    config = dataclasses.replace(SCALED, save_strategy="steps", save_steps=9)
    calls = []

    def stopping(prompts, responses):
        calls.append(len(responses))
        if len(calls) == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return thousand(prompts, responses)

    def trainer_in(name: str) -> PPOTrainer:
        config_there = dataclasses.replace(config, output_dir=str(tmp_path / name))
        return make_trainer(config_there, reward_model=[length, stopping])

    stop = 0
    whole = trainer_in("whole")
    history = whole.train()
    calls, stop = [], 2
    stopped = trainer_in("parts")
    with pytest.raises(RunInterruptedError):
        stopped.train()
    # The second batch is scored again, and counts once.
    assert [moments.count for moments in stopped._run.reward_moments.values()] == [32, 32]
    resumed = trainer_in("parts")
    assert without_clocks(resumed.train(True)) == without_clocks(history)[1:]
    assert everything(resumed) == everything(whole)


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_resumes(tmp_path):
    config = dataclasses.replace(
        CONFIG, save_strategy="steps", save_steps=1, output_dir=str(tmp_path)
    )
    whole = make_trainer(config)
    whole.train()
    for folder in tmp_path.glob("checkpoint-*"):
        state = json.loads((folder / "trainer_state.json").read_text())
        # What version 0.1 wrote: no such setting, and no moments.
        state["identity"]["settings"].pop("scale_each_reward")
        assert state["run"]["reward_moments"] is None
    fingerprint = whole._checkpoints._contents.fingerprint
    assert not fingerprint.differences(state["identity"])
    state["run"].pop("reward_moments")
    run = whole._run
    run.restore(run.as_checkpoint()[0], state["run"])
    assert run.reward_moments is None
    scaled = dataclasses.replace(config, scale_each_reward=True)
    with pytest.raises(TrainingError, match="scale_each_reward=False, which is now True"):
        make_trainer(scaled).train(True)
    # With resume_anyway the moments begin there.
    longer = dataclasses.replace(scaled, total_episodes=48)
    trainer = make_trainer(longer)
    trainer.train(True, resume_anyway=True)
    assert [moments.count for moments in trainer._run.reward_moments.values()] == [16]
    assert read_newest(tmp_path).folder.name == "checkpoint-3"


def test_two_settings_that_both_scale_are_refused():
    with pytest.raises(ConfigError, match=r"scale_each_reward=True .*use_score_scaling=True"):
        dataclasses.replace(CONFIG, scale_each_reward=True, use_score_scaling=True)


TWO_PROCESSES = """
import json, sys
import torch
torch.set_num_threads(1)
from tests.ppo_core.training.test_several_rewards import *
trainer = make_trainer(UNEVEN, prompts=ROWS, reward_model=[by_row, thousand])
trainer.train()
moments = {name: each.state_dict() for name, each in trainer._run.reward_moments.items()}
with open(f"{sys.argv[1]}/moments-{trainer.engine.rank}.json", "w") as file:
    json.dump(moments, file)
if trainer.engine.is_main:
    trainer.save_model(sys.argv[1])
"""

UNEVEN = dataclasses.replace(
    SCALED,
    batch_size=15,
    num_mini_batches=3,
    per_device_train_batch_size=2,
    total_episodes=30,
    adam_epsilon=1e-2,
)


def by_row(prompts: list[str], responses: list[str], number: list[int]) -> list[float]:
    return [n + each for n, each in zip(number, length(prompts, responses), strict=True)]


def test_two_processes_scale_as_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    policies, moments = [], []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        ran = run_python(script, folder, processes=processes)
        assert ran.returncode == 0, ran.stderr
        policies.append(load_policy(folder).state_dict())
        moments += [json.loads(path.read_text()) for path in sorted(folder.glob("moments-*"))]
    assert len(moments) == 3 and moments[1] == moments[2]
    for name, one in moments[0].items():
        assert moments[1][name] == pytest.approx(one, rel=1e-6)
    for name, weight in policies[0].items():
        assert_close(policies[1][name], weight, rtol=0, atol=1e-6, msg=name)


# --- Monitors ---


@pytest.mark.parametrize("scaled", [True, *slow(False)])
@pytest.mark.parametrize("monitor", [infinite, *slow(thousand, "model")])
def test_a_reward_with_weight_0_is_logged_and_changes_nothing(monitor, scaled: bool):
    if monitor == "model":
        # Without the weight the critic would be a copy of this model.
        monitor = RewardModel(make_classifier(), make_tokenizer())
    base = dataclasses.replace(CONFIG, scale_each_reward=scaled)
    alone = make_trainer(base, reward_model={"length": length})
    plain = alone.train()
    config = dataclasses.replace(base, reward_weights=[0.0, 1.0])
    watched = make_trainer(config, reward_model={"seen": monitor, "length": length})
    history = watched.train()
    for name, weight in weights(alone).items():
        assert torch.equal(weight, weights(watched)[name]), name
    for own, update in zip(plain, history, strict=True):
        added = update.pop("rewards/seen")
        assert added == math.inf or monitor is not infinite
        assert {k: v for k, v in update.items() if k not in CLOCKS} == {
            k: v for k, v in own.items() if k not in CLOCKS
        }


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_monitor_that_fails_breaks_no_batch(value: float, caplog):
    def broken(prompts, responses):
        return [value, *[1.0] * (len(responses) - 1)]

    config = dataclasses.replace(CONFIG, reward_weights=[1.0, -0.0])
    metrics = make_trainer(config, reward_model=[length, broken]).step()
    assert "not finite" not in caplog.text
    assert math.isfinite(metrics["objective/scores"]) and metrics["val/ratio"] > 0
    assert not math.isfinite(metrics["rewards/broken"])


@pytest.mark.parametrize("given", [[0.0, 0.0], [0, -0.0], [0.0]])
def test_a_run_that_only_watches_is_refused(given: list[float]):
    with pytest.raises(ConfigError, match=r"reward_weights=\[.*nothing would be learned"):
        dataclasses.replace(CONFIG, reward_weights=given)
