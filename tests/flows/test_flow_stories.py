"""Real stories: a small piece of the run that `make stories` does whole."""

from pathlib import Path

import pytest

from pipeline import stages
from pipeline.settings.settings import make_settings, read_preset
from tests.helpers.paths import ROOT

DATA = ROOT.parent / "shared" / "data"

pytestmark = [
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
    run = stages.start_run(settings, settings, "RLHF", "stories")
    policy = stages.load_policy(settings, run)
    reward_model = stages.load_reward_model(settings, policy, run)
    validation = stages.validate_reward_model(settings, policy, reward_model, run)
    trained = stages.train_policy(settings, policy, reward_model, validation, run)
    champion = stages.find_champion(settings)
    evaluation = stages.evaluate_win_rate(settings, policy, trained, champion, run)

    assert policy["path"] == settings.policy
    assert validation["fit"], validation["reasons"]
    assert validation["accuracy"]["low"] > 0.58
    assert evaluation["win_rate"]["ppo_vs_sft"]["low"] > 0.5
    assert evaluation["kl"]["ppo"] < 10
    assert evaluation["distinct"]["ppo"] > 0.95
