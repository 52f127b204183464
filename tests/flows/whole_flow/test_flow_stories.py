"""Real stories: a small piece of the run that `make stories` does whole."""

from pathlib import Path

import pytest

from pipeline import stages
from pipeline.settings.make_settings import make_settings, read_preset
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
    policy, _ = stages.sft_and_reward_models.load_policy(settings, run)
    reward_model, judge, _ = stages.sft_and_reward_models.load_reward_models(settings, policy, run)
    validation = stages.validation.validate_reward_model(settings, policy, reward_model, judge, run)
    trained = stages.ppo_training.train_policy(settings, policy, reward_model, validation, run)
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
