"""The limits of a judge over all attempts, and what a run has spent on a cached result."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.judges.judge_budget import Budget, BudgetError, Payment, Spent, spent_by
from ppo_core.io.validation import read_record


def test_a_run_that_reuses_its_own_result_has_paid_for_it():
    spent = {"openai:m": Spent(calls=80, tokens=900), "openai:other": Spent(calls=1, tokens=None)}
    stored = json.dumps(asdict(Payment(run="RLHF/1", spent=spent)))
    payment = read_record(json.loads(stored), Payment)
    assert spent_by("RLHF/1", payment) == spent
    assert spent_by("RLHF/2", payment) == {}
    assert spent_by("RLHF/1", None) == {}  # cached by an earlier version


def test_limits_and_figures_cover_all_attempts_of_a_step(tmp_path: Path):
    file = tmp_path / "calls.jsonl"
    killed = Budget(3, 100, file=file)
    killed.start_call("openai:m", 1)
    killed.add_tokens("openai:m", 10)
    killed.start_call("openai:m", 1)
    with file.open("a") as lines:
        lines.write('{"name": "openai:m", "tok')  # killed while it wrote
    again = Budget(3, 100, file=file)
    assert again.calls_left == 1
    assert again.affordable == 3
    again.start_call("openai:m", 1)
    again.add_tokens("openai:m", 5)
    with pytest.raises(BudgetError, match=r"3 used, and judging\.max_calls=3"):
        again.start_call("openai:m", 1)
    assert again.spent({}) == {"openai:m": Spent(calls=3, tokens=15)}
    with pytest.raises(BudgetError, match=r"15 used, and judging\.max_tokens=15"):
        Budget(None, 15, file=file).start_call("openai:m", 1)


def test_a_reply_without_tokens_stays_unknown_in_later_attempts(tmp_path: Path):
    file = tmp_path / "calls.jsonl"
    Budget(None, None, file=file).add_tokens("openai:m", None)
    assert Budget(None, None, file=file).spent({})["openai:m"].tokens is None
