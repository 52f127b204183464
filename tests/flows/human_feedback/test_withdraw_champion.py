"""The champion is withdrawn if users like it less than the one before it."""

import math
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

import registry
from human_feedback.opinions import Opinion
from human_feedback.read_traces import Scale, read_traces
from human_feedback.withdraw_champion import ALPHA, compare_feedback, evidence_of_loss, promoted_at
from pipeline.evaluation.confidence_interval import BETS
from pipeline.registry.change_champion import (
    promote_by_hand,
    read_champions,
    record_decision,
    roll_back,
)
from pipeline.registry.decisions import Decision
from pipeline.registry.sync_aliases import sync_aliases
from pipeline.tracking.mlflow_client import connect
from ppo_core.errors import ModelError
from retraining.retrain import watch_feedback
from serving.answer_traces import record_opinion
from serving.manifest import MANIFEST_TAG
from tests.flows.human_feedback.test_collect_feedback import START, judgment
from tests.helpers.runs.served_answers import serve_answers
from tests.helpers.servers.servers import MlflowServer


def test_the_evidence_is_the_capital_done_by_hand():
    # Losses 1, 0 and -1; each bet b gains 1 + b, 1 and 1 - b, so the largest capital is the first.
    new, old = [False, True, True], [True, True, False]
    assert evidence_of_loss(new, old) == pytest.approx(np.mean(1 + BETS))
    # Against a loss of 0.2, the gains are (1 - 0.2) / 1.2 and (0 - 0.2) / 1.2.
    assert evidence_of_loss(new, old, 0.2) == pytest.approx(np.mean(1 + BETS * 0.8 / 1.2))
    assert evidence_of_loss([True], [False]) == 1.0
    assert evidence_of_loss([], old) == evidence_of_loss(new, []) == 1.0


def test_an_old_judgment_is_compared_once():
    # 500 old judgments make blocks of 2: 250 bets at most, however many new judgments there are.
    old = [True] * 500
    most = evidence_of_loss([False] * 1000, old)
    assert most == evidence_of_loss([False] * 250, old)
    assert math.log(most) == pytest.approx(250 * math.log(1.8) - math.log(6), abs=0.01)


def simulate(before: float, champion: float, old: int, new: int, runs: int, seed: int) -> float:
    """Share of runs in which the champion is withdrawn."""
    lots = np.random.default_rng(seed)
    shown = sum(
        evidence_of_loss(lots.random(new) < champion, lots.random(old) < before) >= 1 / ALPHA
        for _ in range(runs)
    )
    return shown / runs


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
def test_an_equal_champion_is_withdrawn_in_at_most_one_of_a_hundred_tenures(rate: float):
    assert simulate(rate, rate, old=1000, new=1000, runs=2000, seed=1) <= 0.01


def test_a_champion_that_is_worse_by_20_points_is_withdrawn_within_200_judgments():
    assert simulate(0.9, 0.7, old=1000, new=200, runs=500, seed=2) > 0.9


@pytest.fixture
def name(server: MlflowServer) -> str:
    """Version 1 was champion, and version 2 is; 12 users liked version 1 before."""
    made = f"policy-{uuid4().hex[:8]}"
    client = connect()
    client.create_registered_model(made)
    for version in (1, 2):
        client.create_model_version(made, "s3://bucket/policy", tags={MANIFEST_TAG: "0" * 64})
        key = f"RLHF/{version}"
        after = sync_aliases(made)
        record_decision(
            made, version=version, promote=True, reasons=["r"], by=key, key=key, after=after
        )
        if version == 1:
            judge_answers(made, "1", liked=True)
            time.sleep(1.1)  # decisions have their time in seconds
    time.sleep(1.1)
    return made


def judge_answers(name: str, version: str, *, liked: bool) -> None:
    ids = serve_answers(name, version, {f"prompt {n}": f"answer {n}" for n in range(12)})
    for number, answer in enumerate(ids.values()):
        record_opinion(name, answer, user=f"user {number}", liked=liked, correction=None)


def test_a_champion_that_users_like_less_is_withdrawn_once(name: str, capsys):
    assert registry.main(["watch", name, "--withdraw"]) == 0
    told = capsys.readouterr().out
    assert "version 2: 0 users like 0% of the answers; version 1: 12 users like 100%" in told
    assert (
        "evidence that the champion is worse: 1 : 1; needed: 100 : 1. The champion stays." in told
    )
    judge_answers(name, "2", liked=False)
    assert registry.main(["watch", name]) == 0
    assert "needed: 100 : 1. --withdraw withdraws the champion." in capsys.readouterr().out
    assert read_champions(name).champion == 2
    # The flow Retrain asks first of all, if the settings say so.
    plain = {"task": "tldr", "registered_model": name}
    settings = plain | {"promotion": {"withdraw_alpha": 0.01}}
    watch_feedback(plain, "Retrain/1", "")
    assert read_champions(name).champion == 2
    watch_feedback(settings, "Retrain/1", "")
    assert "Version 1 is champion again." in capsys.readouterr().out
    champions = read_champions(name)
    assert champions.champion == 1
    last = champions.decisions[-1]
    assert (last.by, last.action) == ("run Retrain/1", "rolled back")
    assert last.reasons[0].startswith("Users like it less: version 2: 12 users like 0%")
    watch_feedback(settings, "Retrain/2", "")
    assert "has no two champions to compare" in capsys.readouterr().out
    # A person's promotion is not undone by the judgments from before it.
    promote_by_hand(name, 2, reason="It was the prompts.", by="person ann")
    watch_feedback(settings, "Retrain/3", "")
    assert "version 2: 0 users" in capsys.readouterr().out
    assert read_champions(name).champion == 2


def test_nothing_to_compare_stops_no_training(server: MlflowServer, name: str, capsys):
    settings = {"task": "tldr", "promotion": {"withdraw_alpha": 0.01}}
    watch_feedback(settings | {"registered_model": "nobody-made-this"}, "Retrain/1", "")
    assert "has no two champions to compare" in capsys.readouterr().out
    connect().rename_experiment(
        connect().get_experiment_by_name(f"{name}-served").experiment_id, f"{name}-away"
    )
    watch_feedback(settings | {"registered_model": name}, "Retrain/1", "")
    assert "not compared: MLflow has no experiment" in capsys.readouterr().out


def test_a_withdrawal_that_mlflow_refuses_stops_no_training_but_is_an_alarm(
    name: str, capsys, monkeypatch
):
    def refused(*given: Any) -> None:
        raise MlflowException("Permission denied", error_code=PERMISSION_DENIED)

    judge_answers(name, "2", liked=False)
    alarms: list[tuple[str, ...]] = []
    monkeypatch.setattr("retraining.retrain.send_alarm", lambda *given: alarms.append(given))
    monkeypatch.setattr(MlflowClient, "log_param", refused)
    settings = {"task": "tldr", "registered_model": name, "promotion": {"withdraw_alpha": 0.01}}
    watch_feedback(settings, "Retrain/1", "arn:topic")
    assert "feedback: failed: " in capsys.readouterr().out
    ((topic, subject, (sentence,)),) = alarms
    assert topic == "arn:topic" and name in subject and "Permission denied" in sentence
    assert read_champions(name).champion == 2


def test_only_the_version_that_was_compared_is_withdrawn(name: str):
    with pytest.raises(ModelError, match=r"changed from version 1 to version 2 after your"):
        roll_back(name, reason="r", by="run Retrain/1", champion=1)


def test_a_champion_that_was_moved_by_hand_is_the_one_that_is_compared(name: str, capsys):
    judge_answers(name, "2", liked=False)
    connect().set_registered_model_alias(name, "champion", "1")
    assert registry.main(["watch", name]) == 0
    told = capsys.readouterr().out
    assert "by the alias, the champion is version 1; by the history, it is version 2" in told
    assert read_champions(name).champion == 2
    settings = {"task": "tldr", "registered_model": name, "promotion": {"withdraw_alpha": 0.01}}
    watch_feedback(settings, "Retrain/1", "")
    assert "version 1: 0 users like 0% of the answers; version 2: " in capsys.readouterr().out
    assert [one.action for one in read_champions(name).decisions[2:]] == ["found"]


def test_a_version_that_a_person_has_put_back_is_not_withdrawn(name: str, capsys):
    judge_answers(name, "2", liked=True)
    time.sleep(1.1)
    promote_by_hand(name, 1, reason="Version 2 is harmful.", by="person ann")
    time.sleep(1.1)
    judge_answers(name, "1", liked=False)
    settings = {"task": "tldr", "registered_model": name, "promotion": {"withdraw_alpha": 0.01}}
    watch_feedback(settings, "Retrain/1", "")
    told = capsys.readouterr().out
    assert "version 1: 12 users like 0% of the answers; version 2: 12 users like 100%" in told
    assert "A person put version 1 back, so it stays champion." in told
    assert read_champions(name).champion == 1


@pytest.mark.parametrize("given", [("--alpha", "0"), ("--alpha", "1"), ("--margin", "1")])
def test_a_wrong_limit_is_refused(server: MlflowServer, given: tuple[str, ...], capsys):
    connect().create_registered_model(name := f"policy-{uuid4().hex[:8]}")
    assert registry.main(["watch", name, *given]) == 1
    assert "must be above 0 and at most 0.5" in capsys.readouterr().err


def test_a_user_counts_once_and_only_on_the_own_side_of_the_promotion():
    def said(version: int, day: int, liked: bool, user: str = "ann") -> Opinion:
        return replace(judgment(f"a{day}", user, liked, day=day), version=str(version))

    since = START + timedelta(days=10)
    opinions = [
        *(said(1, day, liked) for day, liked in ((1, True), (2, True), (3, False), (11, False))),
        *(said(2, day, liked) for day, liked in ((9, True), (12, False), (13, True))),
        said(2, 14, False, user=""),
        said(1, 4, True, user="bob"),
    ]
    found = compare_feedback(opinions, champion=2, before=1, since=since)
    assert found.users == (1, 2)
    assert found.liked == pytest.approx((0.0, (2 / 3 + 1) / 2))
    assert (
        "version 2: 1 users like 0% of the answers; version 1: 2 users like 83%" in found.describe()
    )


def test_a_later_judgment_of_a_user_changes_no_bet(name: str, capsys):
    ids = serve_answers(name, "2", {user: f"answer to {user}" for user in ("ann", "bob", "eve")})
    for user, answer in ids.items():
        record_opinion(name, answer, user=user, liked=user == "eve", correction=None)
    assert registry.main(["watch", name]) == 0
    before = capsys.readouterr().out
    assert "version 2: 3 users like 33%" in before
    # Ann judges the answer again, and bob's judgment is overridden.
    record_opinion(name, ids["ann"], user="ann", liked=True, correction=None)
    [given] = connect().get_trace(ids["bob"]).info.assessments
    mlflow.override_feedback(
        trace_id=ids["bob"],
        assessment_id=given.assessment_id,
        value=True,
        source=given.source,
    )
    assert registry.main(["watch", name]) == 0
    assert capsys.readouterr().out == before
    # The training data has the last judgments.
    last = read_traces(name, Scale(), version="2").opinions
    assert sorted((one.user, one.disliked) for one in last) == [
        ("ann", None),
        ("bob", None),
        ("eve", None),
    ]


def test_evidence_is_finite_for_a_disaster():
    assert evidence_of_loss([0.0] * 5000, [1.0] * 25_000) > 1e300


def test_the_last_promotion_of_a_version_counts():
    def decision(number: int, champion: int) -> Decision:
        at = (START + timedelta(days=number)).isoformat()
        return Decision(
            number=number,
            action="promoted",
            version=champion,
            champion=champion,
            reasons=(),
            by="run RLHF/1",
            key=str(number),
            at=at,
        )

    made = [decision(1, 4), decision(2, 5), decision(3, 4), decision(4, 5), decision(5, 5)]
    assert promoted_at(made, 5) == START + timedelta(days=4)
