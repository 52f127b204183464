"""The transport of a judge behind an API, against a server that misbehaves."""

import logging
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from email.utils import formatdate

import pytest

from pipeline.judges.chat_model import Question, Reply
from pipeline.judges.openai_model import OpenAIModel
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.errors import ConfigError, JudgeError, StorageError
from tests.helpers.servers.fault_server import (
    Behavior,
    Request,
    Script,
    drip,
    fault_server,
    hang_up,
    refuse,
    respond,
    say,
)

KEY = "sk-secret-0123456789"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def make_chat(url: str, **settings: object) -> OpenAIModel:
    return OpenAIModel("model", JudgingConfig(base_url=url, **{"retries": 0, **settings}))


def make_questions(count: int) -> list[Question]:
    return [[{"role": "user", "content": f"question {i}"}] for i in range(count)]


def ask(chat: OpenAIModel, count: int = 1) -> list[Reply]:
    """The replies to `count` questions, in the questions' order."""
    replies: dict[int, Reply] = {}
    chat.ask(make_questions(count), replies.__setitem__)
    return [replies[number] for number in sorted(replies)]


def once_each(faults: Sequence[Behavior]) -> Script:
    """Question 0 meets the first fault, question 1 the second, ...; asked again, all go well."""
    unmet = {f"question {i}": fault for i, fault in enumerate(faults)}
    return lambda request: unmet.pop(request.question, say("A"))


# What is asked and answered


def test_every_question_gets_its_own_reply():
    def echo(request: Request) -> Behavior:
        return say(request.question.replace("question", "answer"), tokens=5)

    with fault_server(echo) as server:
        replies = ask(make_chat(server.url, concurrency=3), 10)

    assert replies == [Reply(f"answer {i}", tokens=5) for i in range(10)]
    assert {request.path for request in server.requests} == {"/v1/chat/completions"}
    assert {request.authorization for request in server.requests} == {f"Bearer {KEY}"}


def test_a_reply_is_kept_before_its_slot_is_used_again():
    kept: list[int] = []
    seen: list[int] = []

    def note(request: Request) -> Behavior:
        seen.append(len(kept))
        return say("A")

    with fault_server(note) as server:
        make_chat(server.url, concurrency=1).ask(
            make_questions(4), lambda number, reply: kept.append(number)
        )

    assert kept == [0, 1, 2, 3]
    assert seen == [0, 1, 2, 3]


def test_an_error_of_keeping_is_not_hidden():
    def keep(number: int, reply: Reply) -> None:
        raise OSError("disk full")

    with fault_server([say("A")]) as server, pytest.raises(OSError, match="disk full"):
        make_chat(server.url).ask(make_questions(3), keep)


def test_the_deadline_of_a_call_does_not_count_the_keeping_of_other_replies():
    threads: set[threading.Thread] = set()
    slept = threading.Event()

    def keep(number: int, reply: Reply) -> None:
        threads.add(threading.current_thread())
        if not slept.is_set():
            slept.set()
            time.sleep(4.0)

    def answer(request: Request) -> Behavior:
        # The second reply arrives, within its deadline, while the first is being kept.
        time.sleep(0.5 if "1" in request.question else 0.0)
        return say("A")

    with fault_server(answer) as server:
        make_chat(server.url, concurrency=2, deadline_seconds=3.0, retries=1).ask(
            make_questions(2), keep
        )

    assert len(server.requests) == 2
    assert len(threads) == 1


def test_a_reply_that_arrived_is_kept_although_another_call_ends_the_evaluation():
    kept: list[int] = []
    keeping = threading.Event()

    def keep(number: int, reply: Reply) -> None:
        keeping.set()
        time.sleep(2.0)
        kept.append(number)

    def answer(request: Request) -> Behavior:
        if "2" not in request.question:
            return say("A")
        # The other reply arrives, too, while the first is being kept.
        keeping.wait(20)
        time.sleep(1.0)
        return refuse(401)

    with fault_server(answer) as server, pytest.raises(JudgeError, match="401"):
        make_chat(server.url, concurrency=3).ask(make_questions(3), keep)

    assert sorted(kept) == [0, 1]


def test_after_a_reply_that_cannot_be_kept_no_other_is_kept():
    tried: list[int] = []

    def keep(number: int, reply: Reply) -> None:
        tried.append(number)
        time.sleep(1.0)
        raise StorageError("S3 is away")

    with fault_server(lambda request: say("A")) as server, pytest.raises(StorageError):
        make_chat(server.url, concurrency=3).ask(make_questions(3), keep)

    assert len(tried) == 1


@pytest.mark.parametrize("sampling, asked", [("greedy", {"temperature": 0.0}), ("default", {})])
def test_a_call_says_no_more_than_it_must(sampling: str, asked: dict[str, float]):
    # transformers serve refuses fields that it does not know.
    with fault_server([say("A")]) as server:
        ask(make_chat(server.url, sampling=sampling, max_reply_tokens=9))

    assert server.requests[0].body == {
        "model": "model",
        "messages": [{"role": "user", "content": "question 0"}],
        "max_tokens": 9,
        **asked,
    }


def test_the_calls_under_way_are_as_many_as_the_setting_says():
    together = threading.Barrier(3)

    def wait_for_the_others(request: Request) -> Behavior:
        together.wait(timeout=30)  # breaks, and with it the reply, if fewer than 3 ever come
        return say("A")

    with fault_server(wait_for_the_others) as server:
        replies = ask(make_chat(server.url, concurrency=3), 9)

    assert [reply.text for reply in replies] == ["A"] * 9
    assert server.most_under_way == 3


def test_both_letters_come_through_as_they_were_said():
    with fault_server([say("A\nB")]) as server:
        assert ask(make_chat(server.url))[0].text == "A\nB"


def test_no_question_needs_no_server():
    assert ask(make_chat("http://127.0.0.1:9/v1"), 0) == []


# What is repeated


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503, 529])
def test_a_call_is_repeated_after_a_status_that_may_pass(status: int):
    with fault_server([refuse(status), say("A")]) as server:
        replies = ask(make_chat(server.url, retries=1))

    assert replies == [Reply("A", tokens=7)]
    assert len(server.requests) == 2


def test_retry_after_in_seconds_is_waited_for():
    with fault_server([refuse(429, Retry_After="1.5"), say("A")]) as server:
        ask(make_chat(server.url, retries=1))

    first, second = server.requests
    assert second.arrived - first.arrived >= 1.5


def test_retry_after_as_a_date_is_waited_for():
    def until_then(request: Request) -> Behavior:
        return refuse(503, Retry_After=date) if request.number == 0 else say("A")

    then = int(time.time()) + 3  # dates have whole seconds: 2 to 3 from now
    date = formatdate(then, usegmt=True)
    with fault_server(until_then) as server:
        replies = ask(make_chat(server.url, retries=1))

    assert replies[0].text == "A"
    assert server.requests[1].arrived >= then


PAST = "Thu, 01 Jan 1970 00:00:00 GMT"


@pytest.mark.parametrize("asked", [{}, {"Retry_After": "0"}, {"Retry_After": PAST}])
def test_waits_grow_where_the_server_names_none_or_hardly_one(asked: dict[str, str]):
    # 1 and 2 seconds, of which the jitter takes at most half.
    with fault_server([refuse(500, **asked), refuse(500, **asked), say("A")]) as server:
        ask(make_chat(server.url, retries=2))

    first, second, third = (request.arrived for request in server.requests)
    assert second - first >= 0.5
    assert third - second >= 1.0


def test_a_retry_after_that_says_nothing_stops_nothing():
    headers = [PAST, "soon", "nan", "-1", ""]
    faults = [refuse(429, Retry_After=header) for header in headers]
    with fault_server(once_each(faults)) as server:
        replies = ask(make_chat(server.url, retries=1), len(faults))
    assert [reply.text for reply in replies] == ["A"] * len(faults)


def test_a_call_told_to_wait_for_longer_than_ten_minutes_is_given_up():
    with fault_server([refuse(429, "quota of the day is spent", Retry_After="601")]) as server:
        replies = ask(make_chat(server.url, retries=5))

    assert replies[0].text is None
    assert "status 429: quota of the day is spent" in replies[0].error
    assert len(server.requests) == 1


NO_COMPLETION = {
    "html": respond(200, "<html>Sign in</html>", Content_Type="text/html"),
    "empty": respond(200, ""),
    "empty json": respond(200, "", Content_Type="application/json"),
    "list": respond(200, "[1]", Content_Type="application/json"),
    "error": respond(200, '{"error": "busy"}', Content_Type="application/json"),
    "no choices": respond(200, '{"choices": []}', Content_Type="application/json"),
    "no text": say(None),
    "blank text": say(" \n"),
    "hung up": hang_up,
    "cut": respond(200, '{"choices"', Content_Type="application/json", Content_Length="999"),
}


def test_what_is_no_completion_is_asked_again():
    # All at once, for each takes a wait of a second.
    faults = list(NO_COMPLETION.values())
    with fault_server(once_each(faults)) as server:
        replies = ask(make_chat(server.url, retries=1, concurrency=20), len(faults))
    assert dict(zip(NO_COMPLETION, replies, strict=True)) == dict.fromkeys(
        NO_COMPLETION, Reply("A", tokens=7)
    )
    assert len(server.requests) == 2 * len(faults)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("html", "not a chat completion: <html>Sign in</html>"),
        ("empty", "not a chat completion: nothing"),
        ("no text", "the reply has no text (finish_reason='stop')"),
        ("blank text", "the reply has no text (finish_reason='stop')"),
        ("hung up", "disconnected"),
    ],
)
def test_a_question_out_of_retries_has_no_text_and_says_why(fault: str, words: str):
    with fault_server([NO_COMPLETION[fault]]) as server:
        (reply,) = ask(make_chat(server.url))
    assert reply.text is None
    assert words in reply.error


@pytest.mark.parametrize(
    "reason, next_move",
    [("length", "Raise judging.max_reply_tokens"), ("content_filter", "filter removes the answer")],
)
def test_a_reply_that_would_lack_its_text_again_is_paid_once_and_shows_that_the_server_is_up(
    reason: str, next_move: str
):
    with fault_server([say("A"), say(None, finish_reason=reason)]) as server:
        replies = ask(make_chat(server.url, retries=6, concurrency=1), 30)
    assert len(server.requests) == 30
    assert [reply.text for reply in replies] == ["A", *[None] * 29]
    assert f"(finish_reason='{reason}')" in replies[1].error
    assert next_move in replies[1].error


def test_a_server_whose_replies_never_have_a_text_ends_the_evaluation():
    with fault_server([say(None, finish_reason="length")]) as server:
        chat = make_chat(server.url, retries=6, concurrency=1)
        with pytest.raises(JudgeError, match=r"20 questions in a row.*Raise judging\.max_reply"):
            ask(chat, 30)
    assert len(server.requests) == 20


def test_a_call_is_repeated_as_often_as_the_setting_says_and_no_more():
    with fault_server([refuse(500)]) as server:
        ask(make_chat(server.url, retries=2))
    assert len(server.requests) == 3


def test_a_slow_drip_is_cut_at_the_deadline_of_each_attempt():
    # An attempt has all of its own deadline: it would have none of a shared one left. A busy
    # machine may miss it once, hence the retries.
    with fault_server([drip, say("A")]) as server:
        chat = make_chat(server.url, retries=3, deadline_seconds=1.0)
        assert ask(chat)[0].text == "A"

    with fault_server([drip]) as server:
        (reply,) = ask(make_chat(server.url, deadline_seconds=0.2))
    assert reply.error == "no complete reply within judging.deadline_seconds=0.2"


def test_one_question_given_up_leaves_the_others_alone():
    def fail_one(request: Request) -> Behavior:
        return refuse(500) if request.question == "question 1" else say("A")

    with fault_server(fail_one) as server:
        replies = ask(make_chat(server.url), 4)
    assert [reply.text for reply in replies] == ["A", None, "A", "A"]


# What ends everything


@pytest.mark.parametrize(
    "status, next_move",
    [
        (400, 'judging.sampling="default"'),
        (401, "OPENAI_API_KEY"),
        (403, "OPENAI_API_KEY"),
        (404, "judging.base_url"),
        (422, "the model's name, 'model'"),
    ],
)
def test_a_refusal_is_not_repeated_and_names_the_next_move(status: int, next_move: str):
    refusal = refuse(status, "temperature is not supported")
    with fault_server([refusal]) as server, pytest.raises(JudgeError) as caught:
        ask(make_chat(server.url, retries=3, concurrency=1), 5)

    for words in (
        server.url,
        "the call of openai:model",
        f"status {status}",
        "temperature is not",
        next_move,
    ):
        assert words in str(caught.value)
    # Where the question may be at fault, a small one shows that it is not.
    assert len(server.requests) == (2 if status in (400, 422) else 1)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_question_that_alone_is_refused_gets_no_reply_and_ends_nothing(status: int):
    def refuse_long(request: Request) -> Behavior:
        return refuse(status, "too long") if "question 1" in request.question else say("A")

    with fault_server(refuse_long) as server:
        replies = ask(make_chat(server.url, retries=3, concurrency=1), 3)
    assert [reply.text for reply in replies] == ["A", None, "A"]
    assert f"status {status}: too long" in replies[1].error
    assert len(server.requests) == 4


def test_the_advice_on_temperature_is_for_those_who_sent_one():
    with fault_server([refuse(400)]) as server, pytest.raises(JudgeError) as caught:
        ask(make_chat(server.url, sampling="default"))
    assert "judging.sampling" not in str(caught.value)


def test_a_server_that_words_its_errors_otherwise_is_quoted_too():
    fault = respond(422, '{"detail": "Unexpected fields"}', Content_Type="application/json")
    with fault_server([fault]) as server, pytest.raises(JudgeError, match="Unexpected fields"):
        ask(make_chat(server.url))


def test_a_refusal_cancels_the_calls_under_way():
    def refuse_second(request: Request) -> Behavior:
        if request.number == 0:
            server.closing.wait(60)
            return say("A")
        return refuse(401)

    # Without cancelling, the call that is held would be waited for, until the test times out.
    with fault_server(refuse_second) as server, pytest.raises(JudgeError, match="401"):
        ask(make_chat(server.url, concurrency=2, deadline_seconds=1000), 5)
    assert len(server.requests) == 2


def test_twenty_questions_given_up_in_a_row_mean_that_the_server_is_down():
    kept: list[Reply] = []
    with fault_server([refuse(500, "overloaded")]) as server, pytest.raises(JudgeError) as caught:
        make_chat(server.url, concurrency=1).ask(
            make_questions(50), lambda number, reply: kept.append(reply)
        )
    assert len(kept) == len(server.requests) == 20
    assert "seems to be down: 20 questions" in str(caught.value)
    assert "status 500: overloaded" in str(caught.value)
    assert "50 questions are left" in str(caught.value)


def test_an_answer_between_starts_the_count_anew():
    def answer_one(request: Request) -> Behavior:
        return say("A") if request.number == 19 else refuse(500)

    # 19 given up, one answered, 19 given up.
    with fault_server(answer_one) as server:
        replies = ask(make_chat(server.url, concurrency=1), 39)
    assert sum(reply.text is None for reply in replies) == 38


@pytest.mark.parametrize("first", ["answered", "rejected"])
def test_a_server_that_rejects_many_questions_is_not_down_if_it_has_answered_one(first: str):
    def refuse_long(request: Request) -> Behavior:
        is_first = request.question.endswith("question 0")
        is_long = "question" in request.question and not (is_first and first == "answered")
        return refuse(400, "too long") if is_long else say("A")

    with fault_server(refuse_long) as server:
        chat = make_chat(server.url, concurrency=1)
        if first == "rejected":
            with pytest.raises(JudgeError, match=r"20 questions in a row.*too long"):
                ask(chat, 30)
        else:
            replies = ask(chat, 30)
            assert [reply.text for reply in replies] == ["A"] + [None] * 29


def test_the_count_goes_on_from_one_call_of_ask_to_the_next():
    with fault_server([refuse(500)]) as server:
        chat = make_chat(server.url, concurrency=1)
        ask(chat, 19)
        with pytest.raises(JudgeError, match="seems to be down"):
            ask(chat, 1)


# The budget


def test_questions_that_outnumber_the_calls_are_refused_before_the_first():
    with fault_server([say("A")]) as server:
        chat = make_chat(server.url, max_calls=5)
        ask(chat, 3)
        with pytest.raises(JudgeError, match=r"3 questions .* only 2 of judging.max_calls=5 are"):
            ask(chat, 3)
        ask(chat, 2)
    assert len(server.requests) == 5


def test_repeated_calls_count_and_the_replies_so_far_are_kept():
    # Each question takes two calls: the first one has four of five, and the second the fifth.
    def fail_first(request: Request) -> Behavior:
        return say("A") if request.number % 2 else refuse(500)

    kept: list[int] = []
    with fault_server(fail_first) as server:
        chat = make_chat(server.url, max_calls=5, retries=1, concurrency=1)
        with pytest.raises(JudgeError, match=r"5 used, .*max_calls=5\. Questions left: 1"):
            chat.ask(make_questions(3), lambda number, reply: kept.append(number))
    assert kept == [0, 1]
    assert len(server.requests) == chat.budget.calls == 5


def test_no_call_starts_once_the_tokens_are_spent():
    # 7 tokens a reply: 14 after two, above 10, so the third question is not asked.
    with fault_server([say("A", tokens=7)]) as server:
        chat = make_chat(server.url, max_tokens=10, concurrency=1)
        with pytest.raises(JudgeError, match=r"14 used, .*max_tokens=10\. Questions left: 3"):
            ask(chat, 5)
    assert len(server.requests) == 2


def test_tokens_of_replies_without_a_text_are_spent_too():
    with fault_server([say(None, tokens=6)]) as server:
        chat = make_chat(server.url)
        ask(chat)
    assert chat.budget.tokens == 6


def test_a_spent_budget_cancels_the_calls_under_way():
    def hold_first(request: Request) -> Behavior:
        if request.number == 0:
            server.closing.wait(60)
        return say("A", tokens=7)

    with fault_server(hold_first) as server, pytest.raises(JudgeError, match="max_tokens=7"):
        ask(make_chat(server.url, max_tokens=7, concurrency=2, deadline_seconds=1000), 5)
    assert len(server.requests) == 2


def test_a_limit_of_tokens_needs_a_server_that_counts_them():
    with fault_server([say("A", tokens=None)]) as server:
        assert ask(make_chat(server.url)) == [Reply("A", tokens=0)]
        with pytest.raises(JudgeError, match=r"judging.max_tokens=100 .*usage"):
            ask(make_chat(server.url, max_tokens=100))


# The address and the key


def test_openai_itself_needs_a_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        make_chat("")


def test_other_servers_need_no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    with fault_server([say("none")]) as server:
        assert ask(make_chat(server.url))[0].text == "none"
    assert server.requests[0].authorization == "Bearer none"


def test_the_address_is_the_setting_then_the_environment_then_openai(monkeypatch):
    assert "https://api.openai.com/v1" in make_chat("").version
    monkeypatch.setenv("OPENAI_BASE_URL", "http://from-environment/v1")
    assert "http://from-environment/v1" in make_chat("").version
    assert "http://from-setting/v1" in make_chat("http://from-setting/v1").version


def test_openai_itself_is_given_the_limit_by_its_new_name():
    chat = make_chat("", max_reply_tokens=9)
    assert chat._server._request == {
        "model": "model",
        "max_completion_tokens": 9,
        "temperature": 0.0,
    }


@pytest.mark.parametrize("url", ["localhost:8000/v1", "http://", "ftp://a/v1", "http://a:port/v1"])
def test_what_is_no_address_is_refused_before_anything(url: str):
    with pytest.raises(ConfigError, match=r"judging.base_url=.*http://HOST:PORT/v1"):
        make_chat(url)


@pytest.mark.parametrize("secret", ["http://me:pass@a/v1", "http://a/v1?key=pass"])
def test_an_address_with_a_secret_in_it_is_refused_without_being_shown(secret: str):
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        make_chat(secret)
    assert "pass@" not in str(caught.value)
    assert "key=" not in str(caught.value)


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nsecond-line")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        make_chat("")
    assert KEY not in str(caught.value)


def test_white_space_around_a_key_is_no_part_of_it(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\n")
    with fault_server([say("A")]) as server:
        ask(make_chat(server.url))
    assert server.requests[0].authorization == f"Bearer {KEY}"


def test_the_key_is_in_no_message_even_if_the_server_repeats_it():
    # The second one would be cut within the key.
    for words in (f"wrong key: {KEY}", "x" * 290 + KEY):
        with fault_server([refuse(401, words)]) as server:
            chat = make_chat(server.url)
            with pytest.raises(JudgeError) as caught:
                ask(chat)
        assert "sk-secret" not in "".join(traceback.format_exception(caught.value))
        assert "sk-secret" not in repr(chat) + chat.name + chat.version


def test_a_reply_that_quotes_an_authorization_keeps_its_verdict():
    quoted = 'A sends "Authorization: Bearer abcdefghij".\nVERDICT: A'
    with fault_server([say(quoted), say(f"The key is {KEY}.\nVERDICT: B")]) as server:
        replies = ask(make_chat(server.url, concurrency=1), 2)
    assert [reply.text for reply in replies] == [
        'A sends "Authorization: Bearer (hidden)".\nVERDICT: A',
        "The key is (hidden).\nVERDICT: B",
    ]


def test_version_tells_apart_what_decides_a_reply():
    urls = ["http://a/v1", "http://b/v1"]
    settings = [{}, {"sampling": "default"}, {"max_reply_tokens": 5}]
    versions = {make_chat(url, **setting).version for url in urls for setting in settings}
    assert len(versions) == 6
    assert make_chat(urls[0], concurrency=1, max_calls=3).version in versions


# The probe


def test_a_probe_is_one_call_of_the_roles_that_a_judge_uses():
    with fault_server([say("A")]) as server:
        chat = make_chat(server.url)
        chat.probe()
    assert [m["role"] for m in server.requests[0].body["messages"]] == ["system", "user"]
    assert chat.budget.calls == len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_probe_is_refused_as_a_question_is(status: int):
    with fault_server([refuse(status)]) as server, pytest.raises(JudgeError, match=str(status)):
        make_chat(server.url).probe()


def test_a_probe_gives_up_early():
    fault = refuse(500, "broken")
    with fault_server([fault]) as server, pytest.raises(JudgeError, match="500: broken"):
        make_chat(server.url, retries=100).probe()
    assert len(server.requests) == 3


def test_a_probe_of_an_address_where_nobody_listens_says_so():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
    with pytest.raises(JudgeError, match=r"does not answer: .*connection.*\n.*judging.base_url"):
        make_chat(url, retries=100).probe()


def test_the_client_writes_no_line_for_every_call(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with fault_server([say("A")]) as server:
        ask(make_chat(server.url))
    assert caplog.records == []
