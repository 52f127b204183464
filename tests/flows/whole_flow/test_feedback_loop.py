"""From served answers and 500 judgments to a version that learned from them."""

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import tomli_w

from serving.answer_traces import record_opinion
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.paths import ROOT
from tests.helpers.runs.flow_runs import client_of, run_flow
from tests.helpers.runs.served_answers import serve_answers
from tests.helpers.servers.mlflow_store import tracking_to

NAME = "tiny-policy"
RUN = ("--config", "settings", "tiny.toml", "run", "--accept-reward-model")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def judge_answers(folder: Path) -> None:
    """5 users judge 100 answers of version 1 each, and like w1; one in ten judges at random."""
    lots = Random(0)
    texts = {
        f"w{n % 50} w{n // 50 + 2}": " ".join(f"w{lots.randrange(1, 4)}" for _ in range(4))
        for n in range(100)
    }
    with tracking_to(f"sqlite:///{folder / 'mlflow.db'}"):
        ids = serve_answers(NAME, "1", texts)
        for prompt, text in texts.items():
            for user in range(5):
                liked = "w1" in text.split() if lots.random() > 0.1 else lots.random() < 0.5
                record_opinion(NAME, ids[prompt], user=f"user {user}", liked=liked, correction=None)


def test_judgments_of_users_train_the_next_version(tmp_path: Path):
    table = tiny_table(tmp_path) | {"registered_model": NAME}
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(table))
    first = run_flow(tmp_path, *RUN)
    assert first.code == 0, first.log
    judge_answers(tmp_path)
    command = [sys.executable, str(ROOT / "flows" / "feedback.py"), "collect", NAME]
    collected = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert collected.returncode == 0, collected.stderr
    assert "500 opinions of 5 known users" in collected.stdout
    found = re.search(r"To train on it: --set (feedback=\S+)", collected.stdout)
    assert found
    second = run_flow(tmp_path, *RUN, "--set", found[1])
    assert second.code == 0, second.log
    assert "feedback.jsonl: 500 rows" in second.steps["start"]
    client = client_of(tmp_path)
    runs = [client.get_model_version(NAME, version).run_id for version in ("1", "2")]
    tags = [client.get_run(run).data.tags for run in runs]
    assert "data/feedback" not in tags[0]
    assert tags[1]["data/feedback"]
    # The reward model of the first run is not that of the second.
    logs = [ran.steps["load_reward_model"] for ran in (first, second)]
    made = [re.findall(r"reward-model: made (\S+)", log) for log in logs]
    assert len(made[0]) == len(made[1]) == 1 and made[0] != made[1]
