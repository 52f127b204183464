"""What once ended a run after its trainings is refused by the first step, and by `--check`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.judges.verdict import Verdict
from pipeline.preflight.check_inputs import check_inputs
from pipeline.preflight.judge_trial import MOST_PAIRS, ask_judge
from pipeline.settings.make_settings import make_settings
from ppo_core.errors import ConfigError, DataError, JudgeError, ModelError, PPOError
from ppo_core.models.files.finite_weights import require_finite_weights
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model

Change = Callable[[Path, dict[str, Any]], object]


def judge(code: str) -> Change:
    return lambda folder, table: (folder / "judge.py").write_text(code)


def weight(model: str, part: str, value: float) -> Change:
    """Put a value into the first weight whose name has a part."""

    def change(folder: Path, table: dict[str, Any]) -> None:
        file = folder / model / "model.safetensors"
        tensors = load_file(file)
        name = next(name for name in tensors if part in name)
        tensors[name].view(-1)[1] = value
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def config(model: str, **values: Any) -> Change:
    def change(folder: Path, table: dict[str, Any]) -> None:
        file = folder / model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def rope(model: str, theta: float) -> Change:
    return config(model, rope_parameters={"rope_theta": theta, "rope_type": "default"})


def ppo(**values: Any) -> Change:
    return lambda folder, table: table["ppo"].update(values)


def setting(**values: Any) -> Change:
    return lambda folder, table: table.update(values)


NAN, INF = float("nan"), float("inf")

JUDGES: dict[str, tuple[Change, type[PPOError], str]] = {
    "one argument": (judge("def judge(prompts): return []"), ConfigError, r"judge\.py:1 .*two"),
    "three": (judge("\ndef judge(a, b, c): return []"), ConfigError, r"judge\.py:2 .*two lists"),
    "no argument": (judge("def judge(): return []"), ConfigError, r"takes \(\)"),
    "a class of one": (judge("class judge:\n def __init__(self, a): 0"), ConfigError, "two lists"),
    "keywords": (judge("def judge(*, prompts, pairs): return []"), ConfigError, "two lists"),
    "a number": (judge("def judge(p, q): return 3"), DataError, r"judge\.py:1\) returned 3"),
    "none": (judge("def judge(p, q): print(p)"), DataError, "returned None"),
    "a coroutine": (judge("async def judge(p, q): return q"), DataError, "returned <coroutine"),
    "numbers": (judge("def judge(p, q): return [1] * len(q)"), DataError, "gave 1 for pair 1"),
    "a word": (judge("def judge(p, q): return ['A'] * len(q)"), DataError, "gave 'A' for pair 1"),
    "one verdict": (judge("def judge(p, q): return ['first']"), DataError, "1 verdicts for 2"),
    "an error": (
        judge("def judge(p, q):\n    return [{}[one] for one in p]"),
        DataError,
        r"raised KeyError in .*judge\.py:2",
    ),
    "an exit": (judge("def judge(p, q):\n    raise SystemExit"), DataError, r"judge\.py:2"),
    "only invalid": (
        judge("def judge(p, q): return [{'winner': 'invalid', 'reason': 'too long'}] * len(q)"),
        JudgeError,
        r"no verdict on 3 held-out pairs in either order \(too long\)",
    ),
    "rule without its task": (setting(judge="rule"), JudgeError, "The judge rule gave no verdict"),
}

MODELS: dict[str, tuple[Change, type[PPOError], str]] = {
    "a policy with NaN": (weight("policy", "lm_head", NAN), ModelError, "'lm_head.weight' in"),
    "NaN in a layer": (weight("policy", "down_proj", NAN), ModelError, "down_proj.weight' in"),
    "a policy with infinity": (weight("policy", "norm", INF), ModelError, "are not finite"),
    "a reward model with NaN": (weight("reward", "embed", NAN), ModelError, "1 of .* weights"),
    "a head with NaN": (weight("reward", "score", NAN), ModelError, r"'score.weight' in .*reward"),
    "rope_theta 0": (rope("policy", 0.0), ModelError, "'rope_theta' is 0.0, but must be above 0"),
    "rope_theta below 0": (rope("policy", -1.0), ModelError, "must be above 0"),
    "rope_theta NaN": (rope("policy", NAN), ModelError, "must be a number"),
    "rope_theta infinite": (rope("policy", INF), ModelError, "must be above 0 and finite"),
    "rope_theta 0 of rewards": (rope("reward", 0), ModelError, r"reward/config.json' is refused"),
    "an epsilon below 0": (config("policy", rms_norm_eps=-1e-6), ModelError, "at least 0"),
    "an epsilon of NaN": (config("reward", rms_norm_eps=NAN), ModelError, "must be a number"),
}

SETTINGS: dict[str, tuple[Change, type[PPOError], str]] = {
    "report_to unknown": (ppo(report_to="wandbb"), ConfigError, "report_to=.*wandbb is not"),
    "one of two unknown": (ppo(report_to=["tensorboard", "x"]), ConfigError, "x is not supported"),
    "report_to not installed": (ppo(report_to="comet_ml"), ConfigError, "comet_ml' cannot start"),
    "stop_token_id too large": (ppo(stop_token_id=61), ModelError, "one of the policy's 61"),
    "stop_token_id far too large": (
        ppo(stop_token_id=10**9),
        ModelError,
        "would have the maximum length",
    ),
    "stop_token_id below 0": (ppo(stop_token_id=-1), ModelError, "stop_token_id=-1"),
}

CASES = {**JUDGES, **MODELS, **SETTINGS}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_before_anything_is_trained(name: str, tmp_path: Path):
    change, kind, message = CASES[name]
    table = tiny_table(tmp_path) | {"reward_model": write_model(tmp_path / "reward", labels=1)}
    change(tmp_path, table)
    with pytest.raises(kind, match=message):
        check_inputs(make_settings(table, {}))


def test_a_good_judge_says_what_it_preferred(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = tiny_table(tmp_path)
    check_inputs(make_settings(table, {}))
    said = "preferred the answer that people prefer in a held-out pair, in both orders"
    assert f"judge={table['judge']}: {said}" in capsys.readouterr().out


def test_a_judge_that_follows_the_order_is_said_to_do_so(tmp_path: Path, capsys):
    table = tiny_table(tmp_path)
    (tmp_path / "judge.py").write_text("def judge(p, q): return ['first'] * len(q)")
    check_inputs(make_settings(table, {}))
    assert "its preference changed with the order of the answers" in capsys.readouterr().out


class Shy:
    """Gives no verdict on the first pairs."""

    name, version, members = "shy", "1", ()

    def __init__(self, silent: int) -> None:
        self.silent, self.asked = silent, 0

    def __call__(self, prompts, pairs):
        self.asked += 1
        winner = "invalid" if self.asked <= self.silent else "first"
        return [Verdict(winner), Verdict("invalid" if winner == "invalid" else "second")]


def test_a_judge_without_a_verdict_is_asked_about_the_next_pair(tmp_path: Path):
    pairs = [LabeledPair(prompt="p", chosen="a", rejected="b")] * 9
    shy = Shy(MOST_PAIRS - 1)
    assert "preferred the answer that people prefer" in ask_judge(shy, pairs)
    assert shy.asked == MOST_PAIRS
    with pytest.raises(JudgeError, match="gave no verdict on 3 held-out pairs"):
        ask_judge(Shy(MOST_PAIRS), pairs)


ALLOWED: dict[str, Change] = {
    "a number of steps": config("policy", num_steps=50),
    "a task with steps": config("policy", task_specific_params={"a": {"warmup_steps": 100}}),
    "an epsilon of 0": config("policy", layer_norm_eps=0.0),
    "a flag called epsilon": config("policy", use_eps=True),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_other_numbers_of_a_configuration_are_allowed(name: str, tmp_path: Path):
    table = tiny_table(tmp_path)
    ALLOWED[name](tmp_path, table)
    check_inputs(make_settings(table, {}))


def test_the_infinite_constant_of_a_mask_is_allowed(tmp_path: Path):
    """Checkpoints of GPT-NeoX in fp16 hold one, which transformers does not read."""
    file = tmp_path / "model.safetensors"
    tensors = {"masked_bias": torch.tensor(-1e9).half(), "weight": torch.ones(3).half()}
    save_file(tensors, file)
    require_finite_weights(tmp_path)
    save_file(tensors | {"weight": torch.tensor([1.0, -1e9]).half()}, file)
    with pytest.raises(ModelError, match="1 of 2 weights of 'weight'"):
        require_finite_weights(tmp_path)


def test_a_configuration_with_an_infinite_limit_is_allowed(tmp_path: Path):
    """Mamba's configurations have `time_step_limit`, whose upper end is infinite."""
    table = tiny_table(tmp_path)
    config("policy", time_step_limit=[0.0, INF])(tmp_path, table)
    check_inputs(make_settings(table, {}))
