from pathlib import Path

import pytest
from pipeline_inputs import JUDGE, write_model

from pipeline.judges import check_judge, make_judge
from ppo_core.errors import ConfigError, DataError, ModelError

PAIRS = [("w1 w1", "w2"), ("w2", "w1"), ("w2", "w3")]
PROMPTS = ["w4"] * 3


def write_judge(path: Path, body: str) -> str:
    path.write_text(body)
    return f"python:{path}:judge"


def test_a_function_of_a_file_judges(tmp_path: Path):
    judge = make_judge(write_judge(tmp_path / "own.py", JUDGE), end_of_text=True)
    assert judge(PROMPTS, PAIRS) == ["first", "second", "tie"]


def test_a_function_of_a_module_judges(tmp_path: Path, monkeypatch):
    (tmp_path / "own_judge_module.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    judge = make_judge("python:own_judge_module:judge", end_of_text=True)
    assert judge(PROMPTS, PAIRS) == ["first", "second", "tie"]


def test_a_reward_model_prefers_what_it_scores_higher(tmp_path: Path):
    path = write_model(tmp_path / "judge", labels=1)
    judge = make_judge(f"reward-model:{path}", end_of_text=True)
    verdicts = judge(PROMPTS, PAIRS)
    swapped = judge(PROMPTS, [(b, a) for a, b in PAIRS])
    assert set(verdicts) <= {"first", "second"}
    assert [{"first": "second", "second": "first"}[verdict] for verdict in swapped] == verdicts
    assert judge(["w1"], [("w2", "w2")]) == ["tie"]


def test_the_rule_is_the_built_in_tasks_own():
    assert make_judge("rule", end_of_text=True)(["no post of the grammar"], [("a", "b")]) == [
        "invalid"
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def judge(prompts, pairs): return ['first']", "1 verdicts for 3 pairs"),
        ("def judge(prompts, pairs): return [1] * len(pairs)", "gave 1 for pair 0"),
        ("def judge(prompts, pairs): return ['First'] * 3", "'First' for pair 0; a verdict is one"),
    ],
)
def test_what_a_function_returns_is_checked(tmp_path: Path, body: str, message: str):
    judge = make_judge(write_judge(tmp_path / "own.py", body), end_of_text=True)
    with pytest.raises(DataError, match=message):
        judge(PROMPTS, PAIRS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt-4", "judge='gpt-4' is unknown"),
        ("reward-model:", "is unknown"),
        ("python:judge.py", "names no function"),
        ("python:/nowhere/judge.py:judge", r"there is no file /nowhere/judge\.py"),
        ("python:no_such_module:judge", "cannot be imported"),
        ("python:json:judge", "json has no function 'judge'"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_training(spec: str, message: str):
    with pytest.raises(ConfigError, match=message):
        check_judge(spec, "")


def test_a_broken_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be imported"):
        check_judge(write_judge(tmp_path / "own.py", "def judge(:"), "")


def test_the_reward_model_may_not_judge_itself(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_model(tmp_path / "reward", labels=1)
    with pytest.raises(ConfigError, match="is the reward model that PPO trains against"):
        check_judge("reward-model:./reward", path)


def test_a_judging_reward_model_has_one_label(tmp_path: Path):
    path = write_model(tmp_path / "two", labels=2)
    with pytest.raises(ModelError, match="2 labels"):
        check_judge(f"reward-model:{path}", "")
