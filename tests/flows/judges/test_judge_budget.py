"""What a run of the flow has spent on a result that is cached."""

import json
from dataclasses import asdict

from pipeline.judges.judge_budget import Payment, Spent, spent_by
from ppo_core.io.validation import read_record


def test_a_run_that_reuses_its_own_result_has_paid_for_it():
    spent = {"openai:m": Spent(calls=80, tokens=900), "openai:other": Spent(calls=1, tokens=None)}
    stored = json.dumps(asdict(Payment(run="RLHF/1", spent=spent)))
    payment = read_record(json.loads(stored), Payment)
    assert spent_by("RLHF/1", payment) == spent
    assert spent_by("RLHF/2", payment) == {}
    assert spent_by("RLHF/1", None) == {}  # cached by an earlier version
