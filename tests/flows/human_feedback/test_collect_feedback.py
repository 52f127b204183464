"""Repetitions, contradictions, weights, and users to look at."""

import json
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from human_feedback.collect_feedback import collect, weights_of
from human_feedback.implausible_users import find_implausible
from human_feedback.opinions import Opinion
from pipeline.inputs.json_lines import json_line

START = datetime(2025, 11, 1, tzinfo=UTC)


def judgment(answer: str, user: str, liked: bool, day: int = 0) -> Opinion:
    return Opinion(
        prompt="p",
        liked=answer if liked else None,
        disliked=None if liked else answer,
        user=user,
        version="1",
        time=START + timedelta(days=day),
        source=f"{user} {day}",
    )


def test_the_last_opinion_of_a_user_counts_whatever_the_order():
    first, later = judgment("a", "ann", True), judgment("a", "ann", False, day=1)
    for order in ([first, later], [later, first]):
        found = collect(order, [], without=())
        assert found.opinions == [later]
        assert [one.reason for one in found.left_out] == ["the same user said the opposite later"]
    assert len(collect([first, judgment("a", "bob", False)], [], ()).opinions) == 2


def test_unwanted_users_are_left_out_and_disagreement_is_counted():
    opinions = [judgment("a", "ann", True), judgment("a", "bob", False), judgment("b", "eve", True)]
    found = collect(opinions, [], without=["eve"])
    assert ([one.user for one in found.opinions], found.contradictions) == (["ann", "bob"], 1)
    assert [one.user for one in found.left_out] == ["eve"]


def test_the_weight_halves_with_each_half_life():
    times = [START, START + timedelta(days=30), START + timedelta(days=60), None]
    assert weights_of(times, 30.0) == pytest.approx([0.25, 0.5, 1.0, 0.25])
    assert weights_of(times, None) == [1.0] * 4
    assert weights_of([None], 30.0) == [1.0]


def test_a_time_in_the_future_makes_no_other_opinion_old():
    now = datetime.now(UTC)
    times = [now - timedelta(days=30), now, now + timedelta(days=3650)]
    assert weights_of(times, 30.0) == pytest.approx([0.5, 1.0, 1.0], abs=1e-4)


def test_a_masked_line_is_still_json():
    row = {
        "prompt": 'curl -H "Authorization: Bearer abcdefgh12345678" https://x',
        "chosen": [{"content": "-----BEGIN PRIVATE KEY-----\nMIIE\n"}],
        "api_key": "0123456789abcdef",
    }
    line = json_line(row)
    assert json.loads(line).keys() == row.keys()
    assert not [
        secret for secret in ("abcdefgh12345678", "MIIE", "0123456789abcdef") if secret in line
    ]


def users(seed: int, odd: str = "") -> list[Opinion]:
    """10 users judge 40 of 100 answers each; 20 % of the judgments are wrong, of `odd` 80 %."""
    lots = np.random.default_rng(seed)
    good = lots.random(100) < 0.7
    opinions = []
    for user in "abcdefghij":
        for answer in lots.permutation(100)[:40]:
            right = (lots.random() < 0.8) != (user == odd)
            opinions.append(judgment(f"answer {answer}", user, bool(good[answer]) == right))
    return opinions


def test_a_user_who_votes_against_the_others_is_named():
    named = [[one.user for one in find_implausible(users(seed, odd="e"))] for seed in range(40)]
    # Nearly 3 of 4 are found, and at most 1 in 20 times another user is named as well.
    assert named.count(["e"]) >= 24
    assert sum(not {*users} <= {"e"} for users in named) <= 3


def test_users_who_judge_alike_are_not_named():
    assert sum(bool(find_implausible(users(seed))) for seed in range(100)) <= 5


def test_a_user_who_likes_everything_is_named():
    opinions = users(1) + [judgment(f"own {n}", "z", True) for n in range(60)]
    (found,) = find_implausible(opinions)
    assert found.user == "z"
    assert "likes 60 of 60 answers, and the other users like" in found.reason


def test_many_users_are_compared_in_seconds():
    # 100,000 judgments of 10,000 users, of whom 20 like everything.
    lots = np.random.default_rng(0)
    opinions = [
        judgment(f"answer {answer}", f"user {user}", user < 20 or bool(lots.random() < 0.2))
        for user in range(10_000)
        for answer in lots.choice(1_000, 10, replace=False)
    ]
    started = time.monotonic()
    found = find_implausible(opinions)
    assert time.monotonic() - started < 60
    assert {f"user {number}" for number in range(20)} <= {one.user for one in found}


def test_unknown_users_are_not_named():
    assert find_implausible([judgment(f"own {n}", "", n < 50) for n in range(100)]) == []
