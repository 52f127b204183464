"""Real stories: a small piece of the run that `make stories` does whole."""

import json
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest

from pipeline import stages
from pipeline.evaluation.comparison import POINTS
from pipeline.evaluation.evaluate_policies import answer_as_evaluated
from pipeline.evaluation.promotion_gate import reasons_to_refuse
from pipeline.inputs.data_sets import RunData
from pipeline.settings.settings import make_settings, read_preset
from tests.helpers import vader_judge
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.paths import ROOT

STEPS = "load_policy load_reward_model validate_reward_model train_policy evaluate_win_rate".split()

DATA = ROOT.parent / "shared" / "data"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is missing"),
]


def test_ppo_makes_stories_happier(tmp_path: Path, monkeypatch):
    # MLflow would make its file in the folder of the repository.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    # 3,000 of 8,000 pairs, under half of the episodes, and larger steps to make up for them.
    monkeypatch.chdir(ROOT)
    preset = read_preset("stories")
    preset["ppo"] |= {"learning_rate": 1e-3, "kl_coef": 0.08}
    pairs = Path(preset["preferences"]).read_text().splitlines(keepends=True)
    (tmp_path / "pairs.jsonl").write_text("".join(pairs[:3000]))
    settings = make_settings(
        preset,
        {
            "preferences": str(tmp_path / "pairs.jsonl"),
            "output_dir": str(tmp_path / "outputs"),
            "total_episodes": 1600,
        },
    )
    run = stages.start.start_run(settings, settings, "RLHF", "stories", STEPS)
    policy, _ = stages.models.load_policy(settings, run)
    reward_model, judge = stages.models.load_reward_models(settings, policy, run)
    validation = stages.validation.validate_reward_model(settings, policy, reward_model, judge, run)
    trained = stages.training.train_policy(settings, policy, reward_model, validation, run)
    champion = stages.start.find_champion(settings)
    _, evaluation = stages.evaluation.evaluate_win_rate(
        settings, policy, trained, champion, None, run
    )

    assert policy.path == settings.policy
    assert validation.fit, validation.reasons
    assert validation.report().accuracy.low > 0.58
    report = evaluation.report()
    assert report.win_rate["ppo_vs_sft"].low > 0.5
    assert report.kl["ppo"] < 10
    assert report.distinct["ppo"] > 0.95


def over_optimised(folder: Path) -> dict:
    """Settings of a PPO that follows a reward model of 300 film reviews almost without a limit."""
    preset = read_preset("stories")
    names = ("preferences", "prompts", "eval_prompts")
    rows = {
        name: [json.loads(line) for line in Path(preset[name]).read_text().splitlines()]
        for name in names
    }
    # Of 1,000 prompts, 400 train the policy, 300 choose it, and 300 confirm the choice.
    prompts = [{"prompt": row["prompt"]} for row in rows["prompts"] + rows["eval_prompts"]]
    preset |= {
        "preferences": write_rows(folder / "pairs.jsonl", rows["preferences"][:300]),
        "prompts": write_rows(folder / "train.jsonl", prompts[:400]),
        "eval_prompts": write_rows(folder / "eval.jsonl", prompts[400:]),
        "output_dir": str(folder / "outputs"),
        "selection": {"method": "judge", "num_prompts": 300},
    }
    preset["ppo"] |= {"kl_coef": 0.01, "learning_rate": 2e-3, "save_policies": 4}
    preset["evaluation"] |= {"num_examples": 300}
    return preset


def points_against(ours: Sequence[str], others: Sequence[str]) -> list[float]:
    verdicts = vader_judge.judge([""] * len(ours), list(zip(ours, others, strict=True)))
    return [POINTS[each] for each in verdicts]


def with_spread(points: Sequence[float]) -> str:
    """The mean with its 95 % interval."""
    mean, half = fmean(points), 1.96 * stdev(points) / sqrt(len(points))
    return f"{100 * mean:.1f} % ({100 * (mean - half):.1f} .. {100 * (mean + half):.1f})"


def test_of_an_over_optimised_ppo_a_better_policy_is_chosen_or_none_is_promoted(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(ROOT)
    settings = make_settings(over_optimised(tmp_path), {"accept_reward_model": True})
    run = stages.start.start_run(settings, settings, "RLHF", "over", STEPS)
    sft, _ = stages.models.load_policy(settings, run)
    reward_model, judge = stages.models.load_reward_models(settings, sft, run)
    validation = stages.validation.validate_reward_model(settings, sft, reward_model, judge, run)
    trained = stages.training.train_policy(settings, sft, reward_model, validation, run)
    chosen, evaluation = stages.evaluation.evaluate_win_rate(
        settings, sft, trained, None, None, run
    )
    report = evaluation.report()
    # As if the reward model were fit, so that the answers alone decide.
    refused = reasons_to_refuse(
        report,
        settings.promotion,
        reward_model_fit=True,
        candidate=1,
        champion=None,
        kl=report.kl["ppo"],
    )

    # All held-out prompts: the evaluation stops once the win rate is decided.
    prompts = [row["prompt"] for row in RunData(settings).examples()]
    start, last, best = (
        answer_as_evaluated(settings, each.path, prompts, sft.path, tmp_path)
        for each in (sft, trained, chosen)
    )
    of_last, of_best = (points_against(each.texts, start.texts) for each in (last, best))
    gain = [one - other for one, other in zip(of_best, of_last, strict=True)]
    print(
        f"last against SFT {with_spread(of_last)} at a KL of {last.kl:.1f}, "
        f"chosen {with_spread(of_best)} at {best.kl:.1f}, gain {with_spread(gain)}, "
        f"chosen against last {with_spread(points_against(best.texts, last.texts))}, "
        f"{'refused: ' + ' '.join(refused) if refused else 'promoted'}"
    )
    assert fmean(gain) >= 0.1 or refused
