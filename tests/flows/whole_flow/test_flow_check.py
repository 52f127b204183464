"""`python flows/rlhf.py run --check`: every input is checked, and nothing is started."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pytest
import tomli_w

from pipeline.cost.run_size import (
    _disk_of,
    _promotion,
    describe_run,
    describe_time,
    measure_run,
)
from pipeline.cost.run_time import describe_seconds
from pipeline.evaluation.sequential.sequential_test import StoppingRule
from pipeline.settings.gate_configs import PromotionConfig
from pipeline.settings.make_settings import make_settings
from pipeline.stages.check import self_check
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model, write_rows
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.timeout(600)


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment["METAFLOW_DATASTORE_SYSROOT_LOCAL"] = str(folder)
    flow = [sys.executable, str(ROOT / "flows" / "rlhf.py")]
    return subprocess.run(
        [*flow, "--config", "settings", "tiny.toml", "run", "--check", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_check_prints_the_sizes_and_leaves_no_run(tmp_path: Path):
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(tiny_table(tmp_path)))
    ran = check(tmp_path, "--set", "reward_model_training.num_epochs=2")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[-1].startswith("All checks passed. Nothing was trained or registered")
    # 58 pairs in batches of 16 are 4 batches, twice.
    assert any("training: rows 58" in line and "steps 8" in line for line in lines), ran.stdout
    # 3 updates of 4 epochs and 1 minibatch.
    assert any("episodes 24" in line and "optimizer steps 12" in line for line in lines)
    (checked,) = (line for line in lines if line.startswith("self-check"))
    # What costs nothing to know comes first, and the measurement, with its bar, last.
    beginnings = ("policy: parameters", "PPO: prompts", "memory: about", "self-check", "time:")
    found = [one for line in lines for one in beginnings if line.startswith(one)]
    assert list(dict.fromkeys(found)) == list(beginnings), ran.stdout
    assert re.search(r"timing this machine \(fp32, none\): \d+ pass, ", ran.stderr)
    assert "backend the fast path" in checked
    assert not list((tmp_path / ".metaflow").glob("RLHF/*/_parameters"))
    assert not (tmp_path / ".metaflow" / "RLHF" / "latest_run").exists()
    assert not (tmp_path / "outputs" / "runs").exists()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_experiment_by_name("rlhf") is None
    assert not client.search_registered_models()


@pytest.mark.slow
def test_a_misspelt_judge_is_reported_before_anything_is_read(tmp_path: Path):
    table = {"policy": "gone", "preferences": "gone", "prompts": "gone", "eval_prompts": "gone"}
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(table))
    ran = check(tmp_path, "--judge", "opnai:gpt-4o")
    assert ran.returncode == 1
    assert "judge='opnai:gpt-4o' is unknown. Did you mean openai:gpt-4o?" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "outputs").exists()


def test_the_self_check_reads_a_given_reward_model_and_is_left_out_without_memory(
    tmp_path: Path, monkeypatch
):
    table = tiny_table(tmp_path) | {"reward_model": write_model(tmp_path / "reward", labels=1)}
    settings = make_settings(table, {})
    found = re.search(
        r"policy_padded (\S+), reward_model_padded (\S+), backend the fast path, decoded (\S+)$",
        self_check(settings),
    )
    assert found is not None
    assert all(float(difference) < 1e-4 for difference in found.groups())
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**10))
    assert re.search("left out, because the models need .* GiB are free", self_check(settings))


@pytest.mark.slow
def test_the_sizes_are_those_of_the_settings(tmp_path: Path):
    table = tiny_table(tmp_path) | {
        "reward_model": write_model(tmp_path / "reward", labels=1),
        "preferences_test": str(tmp_path / "pairs.jsonl"),
        "preferences": "",
        "sft_data": "",
        "processes": 2,
        "evaluation": {"num_examples": 10},
    }
    settings = make_settings(table, {})
    size = measure_run(settings, has_champion=True)
    assert size.sft is size.reward_model is None
    assert (size.validation_pairs, size.prompts, size.evaluation_prompts) == (64, 32, 10)
    # Prompts of four words, each one token.
    assert size.prompt_tokens == 4 * 32
    assert (size.ppo.num_updates, size.processes, size.contests) == (3, 2, 4)
    # Of each prompt four pairs of samples, in both orders.
    assert "pairs 64, questions to each judge at most 256" in describe_run(size)
    # Four comparisons in both orders.
    assert "questions to each judge at most 80\n" in describe_run(size)
    # One greedy answer and four samples to each prompt; two comparisons in both orders.
    assert (
        "baselines of SFT: prompts at most 10, answers at most 50, questions to each judge at most "
        "40" in describe_run(size)
    )
    off = make_settings(table | {"evaluation": {"baseline_prompts": 0}}, {})
    assert "baselines" not in describe_run(measure_run(off, has_champion=False))
    assert "needs at least 15 prompts, all won, and there are 10 different" in describe_run(size)
    assert re.search("^time: roughly PPO .* on this machine$", describe_time(size, settings))


@pytest.mark.parametrize(("prompts", "gain"), [(64, None), (256, None), (1024, 0.65)])
def test_a_policy_with_the_printed_win_rate_is_shown_to_be_better_in_four_of_five_runs(
    prompts: int, gain: float | None
):
    limits = PromotionConfig(min_gain=gain)
    text = _promotion(limits, prompts, opponents=["SFT"])
    (rate,) = re.findall(r"a policy that wins (\d+\.\d)% on average", text)
    rule = StoppingRule(least=0.5, gain=limits.gain_above(0.5), alpha=limits.alpha)
    rng = np.random.default_rng(prompts)
    weeks = rng.binomial(1, float(rate) / 100, (300, prompts)).astype(float)
    better = np.mean([rule.first_decision(week)[0] == "better" for week in weeks])
    assert 0.74 < better < 1.0
    against_both = _promotion(limits, prompts, opponents=["SFT", "the references"])
    assert "won against SFT and against the references if none" in against_both


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"method": "kl", "num_prompts": 12}, "prompts 12, policies at most 6, .* at most 0\n"),
        (
            {"method": "judge", "num_prompts": 20, "weights": [1.0, 0.5]},
            "prompts 20, policies at most 2, .* at most 80\n",
        ),
        (
            {"method": "judge", "num_prompts": 20, "weights": [1.0, 0.5], "earlier": 2},
            "prompts 20, policies at most 4, .* at most 160, disk for 2 earlier policies .* GiB\n",
        ),
    ],
)
def test_the_answers_and_questions_of_a_choice_are_told(
    choice: dict[str, Any], words: str, tmp_path: Path
):
    choice, earlier = dict(choice), choice.get("earlier", 0)
    choice.pop("earlier", None)
    rows = [{"prompt": f"w{2 + n} w5"} for n in range(50)]
    table = tiny_table(tmp_path) | {"eval_prompts": write_rows(tmp_path / "fifty.jsonl", rows)}
    table["ppo"] = table["ppo"] | {"save_policies": earlier}
    size = measure_run(make_settings(table | {"selection": choice}, {}), has_champion=False)
    assert re.search(f"selection: {words}", describe_run(size))


def test_the_disk_of_earlier_policies_follows_their_precision(tmp_path: Path):
    policy = write_model(tmp_path / "half")
    config = Path(policy) / "config.json"
    for dtype, words in (("float32", "0.11 GiB"), ("bfloat16", "0.056 GiB")):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}))
        # 3 policies of 10 million parameters: 120 or 60 million bytes.
        assert _disk_of(3, 10_000_000, policy) == f", disk for 3 earlier policies {words}"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_times_are_rounded(seconds, words):
    assert describe_seconds(seconds) == words


@pytest.mark.parametrize(("has_champion", "contests"), [(False, 1), (True, 2)])
def test_the_sizes_of_three_inputs_have_a_second_reward_model(
    tmp_path: Path, has_champion: bool, contests: int
):
    table = tiny_table(tmp_path) | {"sft_data": "", "eval_prompts": "", "judge": ""}
    size = measure_run(make_settings(table, {}), has_champion=has_champion)
    # 6 of 64 pairs are held out, and a third of 58 is the judge's: 2, 5, ... 56.
    assert size.reward_model and size.judge
    assert (size.validation_pairs, size.reward_model.rows, size.judge.rows) == (6, 39, 19)
    assert (size.reward_model.optimizer_steps, size.judge.optimizer_steps) == (3, 2)
    assert (size.prompts, size.evaluation_prompts, size.contests) == (29, 3, contests)
    described = describe_run(size)
    # Nine words and the end-of-sequence token in each of the two texts of a pair.
    assert "judge training: rows 19, tokens 380" in described
    # Three prompts in both orders.
    assert f"questions to each judge at most {6 * contests}" in described
