"""PPO follows a poor reward model almost without a limit: a better policy than its last is chosen.

The built-in task with a reward model of 300 pairs, `ppo.kl_coef` 0.01, and the rule as judge.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import pytest

from pipeline import stages
from pipeline.demo.judge import judge
from pipeline.demo.task import build_demo_task
from pipeline.evaluation.compare_in_both_orders import POINTS
from pipeline.evaluation.evaluate_policies import answer_as_evaluated
from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.run_data import RunData
from pipeline.results.step_records import PreparedModel, TrainedPolicy
from pipeline.settings.make_settings import make_settings, read_preset
from pipeline.settings.settings import Settings
from tests.helpers.paths import ROOT

STEPS = "load_policy load_reward_model validate_reward_model train_policy evaluate_win_rate".split()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Trained(NamedTuple):
    """A run until the end of its PPO."""

    run: FlowRun
    sft: PreparedModel
    last: TrainedPolicy


def over_optimized(folder: Path, seed: int) -> Settings:
    """Settings of the run; 256 prompts choose the policy, and 256 others confirm the choice."""
    build_demo_task(folder / "task", seed)
    pairs = (folder / "task" / "preferences-train.jsonl").read_text().splitlines(keepends=True)
    (folder / "pairs.jsonl").write_text("".join(pairs[:300]))
    preset = read_preset("tldr")
    del preset["task"]
    preset |= {
        "policy": str(folder / "task" / "base"),
        "sft_data": str(folder / "task" / "sft.jsonl"),
        "preferences": str(folder / "pairs.jsonl"),
        "preferences_test": str(folder / "task" / "preferences-test.jsonl"),
        "prompts": str(folder / "task" / "prompts-train.jsonl"),
        "eval_prompts": str(folder / "task" / "prompts-eval.jsonl"),
        "judge": f"python:{ROOT / 'flows' / 'pipeline' / 'demo' / 'judge.py'}:judge",
        "output_dir": str(folder / "outputs"),
        "selection": {"method": "judge", "num_prompts": 256},
        "seed": seed,
    }
    # A small reward model needs several passes over so few pairs.
    preset["reward_model_training"] |= {"num_epochs": 4}
    preset["ppo"] |= {"total_episodes": 4096, "kl_coef": 0.01, "save_policies": 3}
    return make_settings(preset, {"accept_reward_model": True})


def points(prompts: Sequence[str], ours: Sequence[str], others: Sequence[str]) -> list[float]:
    return [POINTS[each] for each in judge(prompts, list(zip(ours, others, strict=True)))]


def with_spread(values: Sequence[float]) -> str:
    """The mean with its 95 % interval, in percent."""
    mean, half = fmean(values), 1.96 * stdev(values) / sqrt(len(values))
    return f"{100 * mean:.1f} % ({100 * (mean - half):.1f} .. {100 * (mean + half):.1f})"


def train(settings: Settings) -> Trained:
    """Train all models of the run."""
    run = stages.start.start_run(settings, settings, "RLHF", "over", STEPS)
    sft, _ = stages.sft_and_reward_models.load_policy(settings, run)
    reward_model, _, _ = stages.sft_and_reward_models.load_reward_models(settings, sft, run)
    validation = stages.validation.validate_reward_model(settings, sft, reward_model, None, run)
    trained = stages.ppo_training.train_policy(settings, sft, reward_model, validation, run)
    return Trained(run, sft, trained)


def gain_of_choice(settings: Settings, models: Trained, folder: Path) -> list[float]:
    """Choose a policy, and return its points against SFT minus those of the last policy."""
    run, sft, last = models
    best, _ = stages.evaluation.evaluate_win_rate(settings, sft, last, None, None, run)
    # All prompts: the evaluation stops once the win rate is decided.
    prompts = [row["prompt"] for row in RunData(settings).examples()]
    of_sft, of_last, of_best = (
        answer_as_evaluated(settings, each.path, prompts, sft.path, folder)
        for each in (sft, last, best)
    )
    last_points, best_points = (
        points(prompts, each.texts, of_sft.texts) for each in (of_last, of_best)
    )
    gain = [one - other for one, other in zip(best_points, last_points, strict=True)]
    print(
        f"On {len(prompts)} prompts the last policy wins {with_spread(last_points)} against SFT at "
        f"a KL of {of_last.kl:.1f}, the chosen one {with_spread(best_points)} at {of_best.kl:.1f}: "
        f"gain {with_spread(gain)}. The chosen one wins "
        f"{with_spread(points(prompts, of_best.texts, of_last.texts))} against the last."
    )
    return gain


def test_a_policy_is_chosen_that_is_better_than_the_last(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    settings = over_optimized(tmp_path, seed=11)
    models = train(settings)
    assert fmean(gain_of_choice(settings, models, tmp_path)) >= 0.1
    # Among earlier policies alone, without interpolated ones.
    earlier = replace(settings, selection=replace(settings.selection, weights=[1.0]))
    assert fmean(gain_of_choice(earlier, models, tmp_path)) >= 0.1
