"""The diagnosis of metrics and settings that are damaged, odd or of something else."""

import json
import math
from pathlib import Path

import pytest

from ppo_core import diagnose as command
from ppo_core.checkpointing.folders import MANIFEST, STATE

HOSTILE = {
    "only the divergence": {"objective/kl": 1.0},
    "no responses": {"episode": 0.0, "eps": 0.0, "val/num_eos_tokens": 0.0},
    "NaN": dict.fromkeys(("objective/kl", "objective/scores", "loss/value_avg", "lr"), math.nan),
    "infinite": dict.fromkeys(("objective/kl", "objective/scores", "val/ratio"), math.inf),
    "negative times": {"time/sampling": -1.0, "eps": -1.0, "episode": 1.0},
    "huge": dict.fromkeys(("objective/scores", "val/explained_variance", "lr"), 1e308),
    "an update twice": {"update": 1, "episode": 5.0, "val/num_eos_tokens": 9.0},
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_odd_metrics_are_judged_without_an_error(line, tmp_path: Path, capsys):
    lines = [json.dumps({"update": n, "objective/kl": 1.0} | line) for n in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert command.main([str(tmp_path)]) == 0
    assert "40 updates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "There is no metrics.jsonl in"),
        ({"metrics.jsonl": ""}, "has no metrics of PPO"),
        ({"metrics.jsonl": '{"update": 1, "loss": 2.0}\n'}, "has no metrics of PPO"),
        ({"settings.json": "[1]"}, "has no readable settings"),
        ({"settings.json": "{"}, "cannot be read as JSON"),
        ({"settings.json": '{"warn_ratio": -1}'}, "warn_ratio"),
        (
            {f"checkpoint-1/{STATE}": "{}", f"checkpoint-1/{MANIFEST}": "{}"},
            "has no readable settings",
        ),
    ],
)
def test_the_command_explains_what_it_cannot_read(files, words: str, tmp_path: Path, capsys):
    if files and "metrics.jsonl" not in files:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/metrics.jsonl").write_text('{"update": 1, "objective/kl": 1.0}\n')
    for name, text in files.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert command.main([str(tmp_path / "run")]) == 1
    assert words in capsys.readouterr().err
