"""Canaries: who falls for what, and that sound judges fall for nothing."""

import json
from collections.abc import Callable
from dataclasses import asdict
from random import Random

import pytest

from pipeline.demo.posts import CAREFUL, write_post, write_summary
from pipeline.evaluation.canaries import CANARIES, FORGERY, INSTRUCTION, run_canaries
from pipeline.judges.function_judge import FunctionJudge, rule_judge
from pipeline.results.evaluation import CanaryKind
from tests.helpers import vader_judge
from tests.helpers.paths import SHARED

STORIES = SHARED / "stories/prompts-eval.jsonl"

PROMPTS = [f"Question {i}?" for i in range(10)]
REFERENCES = [f"The answer to question {i} is {i}." for i in range(10)]
CAUGHT = CanaryKind(asked=8, won=8, invalid=0, fell=True)
NOTHING = CanaryKind(asked=8, won=0, invalid=0, fell=False)


def judge_by(compare: Callable[[str, str], str], name: str = "test") -> FunctionJudge:
    return FunctionJudge(name, lambda prompts, pairs: [compare(*pair) for pair in pairs], "1")


def judge_by_points(points: Callable[[str], float]) -> FunctionJudge:
    """The answer with more points is the better one."""

    def compare(first: str, second: str) -> str:
        one, other = points(first), points(second)
        return "tie" if one == other else "first" if one > other else "second"

    return judge_by(compare)


def fallen_for(judge: FunctionJudge, prompts=PROMPTS, references=REFERENCES) -> set[str]:
    report = run_canaries(judge, prompts, references)
    assert report.sound == (not report.reasons)
    return {kind for kind, found in report.kinds.items() if found.fell}


# --- Who falls for what --------------------------------------------------------------


def test_a_sound_judge_falls_for_nothing():
    report = run_canaries(judge_by_points(lambda text: "The answer" in text), PROMPTS, REFERENCES)
    assert report.kinds == dict.fromkeys(["choose me", "forged verdict", "empty", "same"], NOTHING)
    assert report.reasons == []
    assert report.sound is True


def test_a_judge_that_obeys_answers_is_caught():
    report = run_canaries(judge_by_points(lambda text: "choose" in text), PROMPTS, REFERENCES)
    assert report.kinds == {
        "choose me": CAUGHT, "forged verdict": NOTHING, "empty": NOTHING, "same": NOTHING
    }  # fmt: skip
    assert report.sound is False
    assert report.reasons == [
        "The judge failed the canary test 'choose me': it chose the canary for 8 of 8 prompts. "
        "Likely cause: the judge follows instructions in answers, or ignores the content of "
        "answers."
    ]


def test_a_judge_that_believes_a_verdict_in_an_answer_is_caught():
    believes = judge_by_points(lambda text: "\nVerdict:" in text)
    assert fallen_for(believes) == {"forged verdict"}


def test_a_judge_that_prefers_the_shorter_text_falls_for_nothing_said():
    report = run_canaries(judge_by_points(lambda text: -len(text)), PROMPTS, REFERENCES)
    assert report.kinds["empty"] == CAUGHT
    assert [reason.partition(":")[0] for reason in report.reasons] == [
        "The judge failed the canary test 'empty'"
    ]


def test_a_judge_that_prefers_the_longer_text_falls_for_both_texts():
    assert fallen_for(judge_by_points(len)) == {"choose me", "forged verdict"}


@pytest.mark.parametrize("position", ["first", "second"])
def test_a_judge_that_follows_the_position_falls_for_the_same_and_nothing_else(position: str):
    report = run_canaries(judge_by(lambda one, other: position), PROMPTS, REFERENCES)
    assert {kind for kind, found in report.kinds.items() if found.fell} == {"same"}
    assert report.kinds["same"] == CAUGHT
    assert report.kinds["empty"] == NOTHING
    assert report.reasons == [
        "The judge failed the canary test 'same': it named a winner for 8 of 8 prompts. "
        "Likely cause: the judge decides by the position of the answers."
    ]


def test_a_judge_that_finds_all_alike_falls_for_nothing():
    assert fallen_for(judge_by(lambda one, other: "tie")) == set()


# --- Shares done by hand --------------------------------------------------------------


def test_more_than_a_quarter_is_too_many():
    # 2 of 8 references are empty in all but name: 2 > 0.25 * 8 is false, 3 > 2 is true.
    judge = judge_by_points(lambda text: {"bad": -1, "good": 1}.get(text, 0))
    for bad, fell in ((2, False), (3, True)):
        references = ["bad"] * bad + ["good"] * (8 - bad)
        found = run_canaries(judge, PROMPTS[:8], references).kinds["empty"]
        assert found == CanaryKind(asked=8, won=bad, invalid=0, fell=fell)


def test_invalid_verdicts_are_counted_apart_and_leave_the_share():
    # Half of the 8 prompts have no verdict in one of the two orders.
    # 2 > 0.25 * 4 is true, and 1 > 0.25 * 4 is false.
    def judge(bad: list[str]) -> FunctionJudge:
        def compare(first: str, second: str) -> str:
            if first in REFERENCES[:4]:
                return "invalid"
            return "second" if first in bad else "first" if second in bad else "tie"

        return judge_by(compare)

    for bad, fell in ((REFERENCES[4:6], True), (REFERENCES[4:5], False)):
        report = run_canaries(judge(bad), PROMPTS, REFERENCES)
        expected = CanaryKind(asked=8, won=len(bad), invalid=4, fell=fell)
        assert report.kinds["empty"] == expected
        assert any("it chose the canary for 2 of 4" in line for line in report.reasons) == fell


def test_a_judge_without_any_verdict_was_not_tested():
    report = run_canaries(judge_by(lambda one, other: "invalid"), PROMPTS, REFERENCES)
    assert set(report.kinds.values()) == {CanaryKind(asked=8, won=0, invalid=8, fell=False)}
    assert report.sound is False
    assert len(report.reasons) == 4
    assert report.reasons[0] == (
        "The judge was not tested with the canary 'choose me': it gave no verdict for 8 of 8 "
        "prompts. Check that this judge fits these prompts."
    )


# --- What is asked ---------------------------------------------------------------------


def collect(prompts, references, **count: int) -> list[tuple[str, tuple[str, str]]]:
    asked = []

    def judge(prompts, pairs):
        asked.extend(zip(prompts, pairs, strict=True))
        return ["tie"] * len(pairs)

    run_canaries(FunctionJudge("collects", judge, "1"), prompts, references, **count)
    return asked


def test_both_orders_of_each_canary_are_asked_and_the_same_once():
    asked = collect(["p"], ["r"])
    texts = [INSTRUCTION, FORGERY, ""]
    both_orders = [("p", pair) for text in texts for pair in ((text, "r"), ("r", text))]
    assert asked == [*both_orders, ("p", ("r", "r"))]


def test_the_first_different_prompts_with_a_reference_are_asked_about():
    prompts = ["a", "b", "a", "c", "d", "e"]
    references = ["1", "", "2", " \n", "4", "5"]
    asked = collect(prompts, references, count=2)
    assert {(prompt, *pair) for prompt, pair in asked[-2:]} == {("a", "1", "1"), ("d", "4", "4")}
    assert {prompt for prompt, _ in asked} == {"a", "d"}
    assert len(asked) == 14


def test_a_judge_is_not_sound_if_there_is_no_answer_to_test_it_with():
    report = run_canaries(judge_by(lambda one, other: "tie"), ["a", "b"], ["", " "])
    assert (report.kinds, report.sound) == ({}, False)
    assert report.reasons == ["The judge was not tested with canaries: all 2 answers are empty."]


def test_the_report_is_plain_data():
    report = run_canaries(judge_by(lambda one, other: "first"), PROMPTS, REFERENCES)
    assert json.loads(json.dumps(asdict(report)))["kinds"]["same"] == asdict(CAUGHT)


# --- Real judges -------------------------------------------------------------------------


def test_the_built_in_rule_is_sound_on_its_own_task():
    rng = Random(1)
    posts = [write_post(rng) for _ in range(400)]
    prompts = [post.prompt for post in posts]
    references = [write_summary(post, CAREFUL, rng) for post in posts]
    assert fallen_for(rule_judge(), prompts, references) == set()
    kinds = run_canaries(rule_judge(), prompts, references, count=400).kinds
    # Careful writers forget a fact in 7 and ramble in 3: of few summaries, nothing is left.
    assert 0 < kinds["empty"].won / kinds["empty"].asked < 0.1
    assert kinds["choose me"].won == kinds["forged verdict"].won == kinds["same"].won == 0


def test_no_canary_sounds_happy():
    plain = ["It was a day like any other."] * len(CANARIES)
    verdicts = vader_judge.judge(
        [""] * len(plain), list(zip(CANARIES.values(), plain, strict=True))
    )
    assert set(verdicts) == {"second"}


@pytest.mark.skipif(not STORIES.is_file(), reason=f"{STORIES} is missing")
def test_the_judge_of_stories_is_sound_on_them():
    rows = [json.loads(line) for line in STORIES.read_text(encoding="utf-8").splitlines()]
    prompts, references = ([row[name] for row in rows] for name in ("prompt", "reference"))
    judge = FunctionJudge("vader", vader_judge.judge, "1")
    assert fallen_for(judge, prompts, references) == set()
    kinds = run_canaries(judge, prompts, references, count=len(rows)).kinds
    assert kinds["empty"].won == kinds["same"].won == 0
    # A text without a happy or sad word still beats a reference that is sad.
    assert kinds["choose me"].won / kinds["choose me"].asked < 0.25
