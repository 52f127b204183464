"""The champion is withdrawn if users like it less than the one before it."""

import math
from uuid import uuid4

import numpy as np
import pytest

import registry
from human_feedback.watch import ALPHA, compare_feedback, evidence_of_loss
from pipeline.evaluation.sequential.betting import BETS
from pipeline.registry.alias_sync import settle
from pipeline.registry.change_champion import decide, read_champions
from pipeline.tracking.mlflow_client import connect
from retraining.watch import watch_feedback
from serving.answer_traces import record_opinion
from tests.flows.human_feedback.test_collect import judgment
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
    """Version 1 was champion, and version 2 is; 12 users like each answer of version 1."""
    made = f"policy-{uuid4().hex[:8]}"
    client = connect()
    client.create_registered_model(made)
    for version in (1, 2):
        client.create_model_version(made, "s3://bucket/policy")
        key = f"RLHF/{version}"
        after = settle(made)
        decide(made, version=version, promote=True, reasons=["r"], by=key, key=key, after=after)
    judge_answers(made, "1", liked=True)
    return made


def judge_answers(name: str, version: str, *, liked: bool) -> None:
    ids = serve_answers(name, version, {f"prompt {n}": f"answer {n}" for n in range(12)})
    for number, answer in enumerate(ids.values()):
        record_opinion(name, answer, user=f"user {number}", liked=liked, correction=None)


def test_a_champion_that_users_like_less_is_withdrawn_once(name: str, capsys):
    assert registry.main(["watch", name, "--withdraw"]) == 0
    told = capsys.readouterr().out
    assert "version 2: 0 of 0 answers liked; version 1: 12 of 12" in told
    assert "evidence that it is worse 1 : 1, of 100 : 1 needed. The champion stays." in told
    judge_answers(name, "2", liked=False)
    assert registry.main(["watch", name]) == 0
    assert (
        "which suffices (alpha 0.01). --withdraw withdraws the champion." in capsys.readouterr().out
    )
    assert read_champions(name).champion == 2
    # The flow Retrain asks first of all, if the settings say so.
    plain = {"task": "tldr", "registered_model": name}
    settings = plain | {"promotion": {"withdraw_alpha": 0.01}}
    watch_feedback(plain, "Retrain/1")
    assert read_champions(name).champion == 2
    watch_feedback(settings, "Retrain/1")
    assert "Version 1 is champion again." in capsys.readouterr().out
    champions = read_champions(name)
    assert champions.champion == 1
    last = champions.decisions[-1]
    assert (last.by, last.action) == ("run Retrain/1", "rolled back")
    assert last.reasons[0].startswith("Users like it less: version 2: 0 of 12 answers liked")
    watch_feedback(settings, "Retrain/2")
    assert "has no two champions to compare" in capsys.readouterr().out


@pytest.mark.parametrize("given", [("--alpha", "0"), ("--alpha", "1"), ("--margin", "1")])
def test_a_wrong_limit_is_refused(name: str, given: tuple[str, ...], capsys):
    assert registry.main(["watch", name, *given]) == 1
    assert "must be above 0 and at most 0.5" in capsys.readouterr().err


def test_only_single_judgments_of_the_two_versions_count():
    opinions = [judgment(f"a{n}", f"user {n}", n % 4 > 0, day=n) for n in range(40)]
    found = compare_feedback(opinions, champion=1, before=2)
    assert (found.liked, found.judged, found.evidence) == ((30, 0), (40, 0), 1.0)
    assert "version 1: 30 of 40 answers liked; version 2: 0 of 0" in found.describe()
