"""The judge that asks a chat model: nothing is asked twice, and what failed is asked again."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.judges import judge_prompt
from pipeline.judges.chat_judge import ChatJudge
from pipeline.judges.chat_model import Question, Reply
from pipeline.judges.reply_cache import ReplyCache, reply_key
from pipeline.judges.verdict import Verdict
from pipeline.settings.judge_config import JudgingConfig
from pipeline.storage.addresses import S3Address
from pipeline.storage.objects import write_object
from pipeline.storage.s3_client import s3_client
from ppo_core.errors import JudgeError
from tests.helpers.servers.servers import BUCKET, s3

PROMPTS = ["p0", "p1", "p2"]
PAIRS = [("good", "bad"), ("bad", "good"), ("good", "good")]


class Scripted:
    """A chat model that prefers "good", and fails as often as it is told to."""

    name = "scripted"

    def __init__(self, *, silent: int = 0, version: str = "1", budget: int | None = None) -> None:
        self.version = version
        self.silent = silent
        self.budget = budget
        self.unreachable: set[str] = set()
        self.asked: list[tuple[str, str, str]] = []
        self.reminded: list[bool] = []

    def ask(self, questions: Sequence[Question], keep: Callable[[int, Reply], None]) -> None:
        assert questions, "asked for nothing"
        # Replies come in another order than the questions.
        for number in reversed(range(len(questions))):
            if self.budget is not None and len(self.asked) >= self.budget:
                raise JudgeError("The budget is spent.")
            keep(number, self._reply(questions[number]))

    def _reply(self, question: Question) -> Reply:
        shown = json.loads(question[1]["content"].split("\n")[1])
        case = (shown["prompt"], shown["answer_a"], shown["answer_b"])
        self.asked.append(case)
        self.reminded.append(judge_prompt.REMINDER in question[1]["content"])
        if shown["prompt"] in self.unreachable:
            return Reply(None, error="The server is on fire.")
        if self.asked.count(case) <= self.silent:
            return Reply(f"Hard to say ({self.asked.count(case)}).", tokens=7)
        a, b = case[1] == "good", case[2] == "good"
        letter = "TIE" if a == b else "A" if a else "B"
        return Reply(f"Because.\nVERDICT: {letter}", tokens=9)


def make_judge(folder: Path, chat: Scripted, **settings) -> ChatJudge:
    return ChatJudge(chat, JudgingConfig(**settings), ReplyCache(folder))


def winners(verdicts: Sequence[Verdict]) -> list[str]:
    return [verdict.winner for verdict in verdicts]


# --- Asking ------------------------------------------------------------------------


def test_every_pair_gets_its_own_verdict_in_the_order_of_the_pairs(tmp_path: Path):
    chat = Scripted()
    verdicts = make_judge(tmp_path, chat)(PROMPTS, PAIRS)
    assert verdicts == [
        Verdict("first", reason="Because."),
        Verdict("second", reason="Because."),
        Verdict("tie", reason="Because."),
    ]
    assert len(chat.asked) == 3


def test_the_same_question_is_asked_once_and_the_other_order_is_another_question(tmp_path: Path):
    chat = Scripted()
    verdicts = make_judge(tmp_path, chat)(["p", "p", "p"], [PAIRS[0], PAIRS[1], PAIRS[0]])
    assert winners(verdicts) == ["first", "second", "first"]
    assert sorted(chat.asked) == [("p", "bad", "good"), ("p", "good", "bad")]


def test_no_pairs_are_no_questions(tmp_path: Path):
    assert make_judge(tmp_path, Scripted(budget=0))([], []) == []


def test_a_pair_without_its_prompt_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="longer"):
        make_judge(tmp_path, Scripted())(["p"], PAIRS)


def test_a_reply_without_a_verdict_is_asked_again_with_the_reminder(tmp_path: Path):
    chat = Scripted(silent=2)
    assert winners(make_judge(tmp_path, chat)(PROMPTS, PAIRS)) == ["first", "second", "tie"]
    assert set(Counter(chat.asked).values()) == {3}
    assert chat.reminded == [False] * 3 + [True] * 6


def test_only_what_has_no_verdict_is_asked_again(tmp_path: Path):
    # One pair is known from before in its first attempt, so silence meets the other two alone.
    chat = Scripted()
    judge = make_judge(tmp_path, chat)
    judge(PROMPTS[:1], PAIRS[:1])
    chat.silent = 1
    assert winners(judge(PROMPTS, PAIRS)) == ["first", "second", "tie"]
    assert Counter(chat.asked) == {
        ("p0", "good", "bad"): 1,
        ("p1", "bad", "good"): 2,
        ("p2", "good", "good"): 2,
    }


def test_after_the_last_attempt_a_pair_is_invalid_for_its_last_reason(tmp_path: Path):
    chat = Scripted(silent=9)
    verdicts = make_judge(tmp_path, chat, attempts=2)(PROMPTS, PAIRS)
    reason = "The reply has no verdict: 'Hard to say (2).'"
    assert verdicts == [Verdict("invalid", reason=reason)] * 3
    assert len(chat.asked) == 6


def test_a_question_that_got_no_reply_is_invalid_and_asked_by_the_next_call_alone(tmp_path: Path):
    chat = Scripted()
    chat.unreachable = {"p1"}
    judge = make_judge(tmp_path, chat)
    verdicts = judge(PROMPTS, PAIRS)
    assert winners(verdicts) == ["first", "invalid", "tie"]
    assert verdicts[1].reason == "The server is on fire."
    assert len(chat.asked) == 3
    chat.unreachable = set()
    assert winners(judge(PROMPTS, PAIRS)) == ["first", "second", "tie"]
    assert chat.asked[3:] == [("p1", "bad", "good")]


def test_a_question_that_is_lost_in_its_second_attempt_begins_there_again(tmp_path: Path):
    chat = Scripted(silent=1, budget=1)
    judge = make_judge(tmp_path, chat)
    with pytest.raises(JudgeError, match="budget"):
        judge(PROMPTS[:1], PAIRS[:1])
    chat.budget, chat.unreachable = None, {"p0"}
    verdict = judge(PROMPTS[:1], PAIRS[:1])[0]
    assert verdict == Verdict("invalid", reason="The server is on fire.")
    chat.unreachable = set()
    assert winners(judge(PROMPTS[:1], PAIRS[:1])) == ["first"]
    assert chat.reminded == [False, True, True]


# --- Keeping -----------------------------------------------------------------------


def test_a_judge_that_starts_anew_pays_for_nothing_twice_invalid_replies_included(tmp_path: Path):
    before = make_judge(tmp_path, Scripted(silent=1))(PROMPTS, PAIRS)
    assert make_judge(tmp_path, Scripted(budget=0))(PROMPTS, PAIRS) == before


def test_an_interrupted_judge_keeps_the_replies_that_came(tmp_path: Path):
    first, second = Scripted(budget=2), Scripted()
    with pytest.raises(JudgeError, match="budget"):
        make_judge(tmp_path, first)(PROMPTS, PAIRS)
    assert winners(make_judge(tmp_path, second)(PROMPTS, PAIRS)) == ["first", "second", "tie"]
    assert len(first.asked) == 2
    assert len(second.asked) == 1


@pytest.mark.parametrize(
    ("chat", "settings"),
    [(Scripted(version="2"), {}), (Scripted(), {"criterion": "Which is shorter?"})],
    ids=["another model", "another criterion"],
)
def test_another_model_or_criterion_is_another_judge_and_asked_anew(tmp_path, chat, settings):
    judge = make_judge(tmp_path, Scripted())
    other = make_judge(tmp_path, chat, **settings)
    judge(PROMPTS, PAIRS)
    other(PROMPTS, PAIRS)
    assert len(chat.asked) == 3
    assert judge.version != other.version


def test_a_judge_is_named_by_its_model_and_its_wording(tmp_path: Path, monkeypatch):
    judge = make_judge(tmp_path, Scripted(), criterion="Which is shorter?")
    version = judge_prompt.prompt_version("Which is shorter?")
    assert judge.name == f"scripted, prompt {version}"
    assert judge.members == ()
    assert judge.version == make_judge(tmp_path, Scripted(), criterion="Which is shorter?").version
    more = make_judge(tmp_path, Scripted(), criterion="Which is shorter?", attempts=4)
    assert (more.name, more.version != judge.version) == (judge.name, True)
    monkeypatch.setattr(judge_prompt, "RULES", "Flip a coin.")
    changed = make_judge(tmp_path, Scripted(), criterion="Which is shorter?")
    assert changed.name != judge.name
    assert changed.version != judge.version


# --- The cache ---------------------------------------------------------------------

KEY = {"model": "m", "wording": "w", "prompt": "p", "first": "a", "second": "b", "attempt": 1}


def test_a_key_is_the_digest_of_everything_that_decides_a_reply():
    changed = [KEY | {name: 2 if name == "attempt" else f"other {name}"} for name in KEY]
    swapped = KEY | {"first": "b", "second": "a"}
    shifted = KEY | {"prompt": "pa", "first": ""}
    keys = {reply_key(**key) for key in [KEY, *changed, swapped, shifted]}
    assert len(keys) == 9
    assert all(len(key) == 64 for key in keys)
    assert reply_key(**KEY) in keys


@pytest.mark.parametrize("text", ["VERDICT: A", "", "\ud800 \x00 \u2028 漢字"])
def test_a_reply_is_there_for_a_new_object_as_it_was(tmp_path: Path, text: str):
    key = reply_key(**KEY)
    assert ReplyCache(tmp_path / "new").get(key) is None
    ReplyCache(tmp_path / "new").put(key, Reply(text, tokens=12))
    assert ReplyCache(tmp_path / "new").get(key) == Reply(text, tokens=12)
    assert ReplyCache(tmp_path / "new").get(reply_key(**KEY | {"attempt": 2})) is None


def test_a_blank_reply_that_an_earlier_version_stored_is_asked_for_again(tmp_path: Path):
    make_judge(tmp_path, Scripted())(PROMPTS[:1], PAIRS[:1])
    (file,) = tmp_path.rglob("*.json")
    ReplyCache(tmp_path).put(file.stem, Reply(" "))
    chat = Scripted()
    assert winners(make_judge(tmp_path, chat)(PROMPTS[:1], PAIRS[:1])) == ["first"]
    assert len(chat.asked) == 1


def test_a_reply_in_s3_serves_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also if the machine that paid for it is gone; what another program wrote there is refused."""
    key = reply_key(**KEY)
    with s3() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3_client.cache_clear()
        shared = S3Address.parse(f"s3://{BUCKET}/rlhf/cache/replies")
        assert ReplyCache(tmp_path / "a", shared).get(key) is None
        ReplyCache(tmp_path / "a", shared).put(key, Reply("VERDICT: A", tokens=12))
        assert ReplyCache(tmp_path / "b", shared).get(key) == Reply("VERDICT: A", tokens=12)
        # The second machine has stored the reply, so it reads it from S3 only once.
        assert ReplyCache(tmp_path / "b").get(key) == Reply("VERDICT: A", tokens=12)
        write_object(shared.below(f"{key[:2]}/{key}.json"), b"[]")
        with pytest.raises(JudgeError, match=f"s3://{BUCKET}/.*{key}.json does not contain"):
            ReplyCache(tmp_path / "c", shared).get(key)
        assert ReplyCache(tmp_path / "c").get(key) is None
    s3_client.cache_clear()


def test_a_reply_is_one_whole_file_under_its_key(tmp_path: Path):
    key = reply_key(**KEY)
    ReplyCache(tmp_path).put(key, Reply("old"))
    ReplyCache(tmp_path).put(key, Reply("new"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / key[:2] / f"{key}.json"]


def test_a_reply_that_could_not_be_written_whole_is_not_there(tmp_path: Path, monkeypatch):
    def fail(handle: int) -> None:
        raise OSError("The disk is full.")

    key = reply_key(**KEY)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        ReplyCache(tmp_path).put(key, Reply("VERDICT: A"))
    assert ReplyCache(tmp_path).get(key) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"text": "VERDICT',
        b"\xff\xfe\x00",
        b"[]",
        b'{"text": null, "tokens": 3}',
        b'{"text": "VERDICT: A"}',
        b'{"text": "VERDICT: A", "tokens": "3"}',
    ],
)
def test_a_torn_or_foreign_file_is_named_and_nothing_is_asked(tmp_path: Path, content: bytes):
    chat = Scripted()
    judge = make_judge(tmp_path, chat)
    judge(PROMPTS[:1], PAIRS[:1])
    (path,) = tmp_path.rglob("*.json")
    path.write_bytes(content)
    with pytest.raises(JudgeError, match=f"{path.name} .* Delete the file"):
        judge(PROMPTS, PAIRS)
    assert len(chat.asked) == 1
    path.unlink()
    judge(PROMPTS, PAIRS)
    assert len(chat.asked) == 4
