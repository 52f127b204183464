"""What a run of the flow has spent on a result that is cached."""

import json

from pipeline.judges.judge_budget import Spent, as_payment, spent_by


def test_a_run_that_reuses_its_own_result_has_paid_for_it():
    spent = {"openai:m": Spent(calls=80, tokens=900), "openai:other": Spent(calls=1, tokens=None)}
    values = json.loads(json.dumps({"pairs": 40} | as_payment("RLHF/1", spent)))
    assert spent_by("RLHF/1", values) == spent
    assert spent_by("RLHF/2", values) == {}
    assert spent_by("RLHF/1", {"pairs": 40}) == {}  # cached by an earlier version
