"""Judges behind servers: a real model behind a real one, and a run that is killed half-way."""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.evaluation.compare_in_both_orders import compare
from pipeline.evaluation.win_rate import measure_win_rate
from pipeline.judges.chat_judge import ChatJudge
from pipeline.judges.openai_model import OpenAIModel
from pipeline.judges.reply_cache import ReplyCache
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.errors import JudgeError
from tests.helpers.inputs.pipeline_inputs import write_model, write_rows
from tests.helpers.models.chat import ASSISTANT, LETTER_A, write_parrot
from tests.helpers.models.tiny import EOS
from tests.helpers.paths import ROOT
from tests.helpers.servers.fault_server import Behavior, Request, fault_server, refuse, say

pytestmark = pytest.mark.timeout(240)

PROMPTS = [f"prompt {i}" for i in range(6)]
OURS = [f"ours {i}" for i in range(6)]
THEIRS = [f"theirs {i}" for i in range(6)]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# A real server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A chat model that says "A" to everything."""
    return write_parrot(tmp_path_factory.mktemp("judge"), [ASSISTANT, LETTER_A, EOS])


@pytest.fixture(scope="module")
def served(model: str, tmp_path_factory: pytest.TempPathFactory):
    """Address of `transformers serve` with that model."""
    pytest.importorskip("uvicorn", reason="the extra transformers[serving] is missing")
    port = free_port()
    command = Path(sys.executable).with_name("transformers")
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [command, "serve", model, "--host", "127.0.0.1", "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
    try:
        while not is_up(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            return response.status == 200
    except (urllib.error.URLError, TimeoutError):
        return False


def test_a_served_model_that_always_says_first_is_even_and_inconclusive(
    served: str, model: str, tmp_path: Path
):
    config = JudgingConfig(base_url=served, max_reply_tokens=8, max_calls=12, max_tokens=100_000)
    chat = OpenAIModel(model, config)

    comparison = compare(ChatJudge(chat, config, ReplyCache(tmp_path)), PROMPTS, OURS, THEIRS)

    rate = measure_win_rate(comparison, max_invalid=0.05, max_flip_rate=0.5)
    assert (rate.rate, rate.flip_rate, rate.ties, rate.invalid) == (0.5, 1.0, 6, 0)
    assert not rate.conclusive
    assert model in rate.judge
    assert chat.budget.calls == 12  # 6 pairs in 2 orders
    assert chat.budget.tokens > 0


def test_transformers_serve_passes_the_probe_and_counts_its_tokens(served: str, model: str):
    chat = OpenAIModel(model, JudgingConfig(base_url=served))
    chat.probe()
    # <system> and 5 words; <user>, 4 words, "A" and "."; <assistant>; the reply "A" and its end
    assert chat.budget.tokens == 6 + 7 + 1 + 2


def test_another_model_than_the_one_that_is_served_is_refused(served: str):
    with pytest.raises(JudgeError, match=r"status 400: .*another"):
        OpenAIModel("another", JudgingConfig(base_url=served)).probe()


# A run that is killed

JUDGE = """
import sys
from pathlib import Path
from pipeline.judges.chat_judge import ChatJudge
from pipeline.settings.judge_config import JudgingConfig
from pipeline.judges.openai_model import OpenAIModel
from pipeline.judges.reply_cache import ReplyCache

url, folder, number = sys.argv[1:]
config = JudgingConfig(base_url=url, concurrency=3)
judge = ChatJudge(OpenAIModel("model", config), config, ReplyCache(Path(folder)))
verdicts = judge([f"prompt {i}" for i in range(int(number))], [("one", "other")] * int(number))
print(*(verdict.winner for verdict in verdicts))
"""


def start_judging(url: str, folder: Path, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", JUDGE, url, str(folder), str(number)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'flows'}"},
        stdout=subprocess.PIPE,
        text=True,
    )


class Holding:
    """Answers so many questions, and the others only once the client has been killed."""

    def __init__(self, answers: int, says: str | Callable[[Request], str]) -> None:
        self.answered: list[str] = []
        self.is_killed = threading.Event()
        self._answers = answers
        self._says = says
        self._counting = threading.Lock()

    def __call__(self, request: Request) -> Behavior:
        with self._counting:
            if len(self.answered) < self._answers or self.is_killed.is_set():
                self.answered.append(request.question)
                return say(self._says if isinstance(self._says, str) else self._says(request))
        self.is_killed.wait(120)
        return refuse(500)


@pytest.mark.slow
def test_a_killed_run_that_is_run_again_pays_for_no_answered_question_twice(tmp_path: Path):
    script = Holding(5, "VERDICT: A")
    with fault_server(script) as server:
        first = start_judging(server.url, tmp_path, 12)
        # 3 calls at a time: once 3 are held behind the 5 that were answered, those 5 are kept.
        server.wait_for(5 + 3)
        first.kill()
        first.communicate()
        paid = script.answered.copy()
        script.is_killed.set()
        second = start_judging(server.url, tmp_path, 12)
        said, _ = second.communicate(timeout=120)

    assert said.split() == ["first"] * 12
    asked = Counter(request.question for request in server.requests)
    assert len(paid) == 5
    assert all(asked[question] == 1 for question in paid)
    assert len(asked) == len(script.answered) == 12
    assert sum(asked.values()) == 12 + 3


def start_command(url: str, folder: Path) -> subprocess.Popen[str]:
    flags = (
        "--model policy --response-length 6 --eval-prompts eval.jsonl "
        f"--judge openai:model --base-url {url} --concurrency 3"
    )
    return subprocess.Popen(
        [sys.executable, ROOT / "flows" / "win_rate.py", *flags.split()],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_command_answers_as_before_and_asks_only_what_is_left(tmp_path: Path):
    write_model(tmp_path / "policy")
    rows = [{"prompt": f"w{i} w{i + 1}", "reference": f"w{i}"} for i in range(12)]
    write_rows(tmp_path / "eval.jsonl", rows)
    # The probe, the canaries (3 kinds in both orders and one in one, of 8 prompts), and 5 pairs.
    script = Holding(1 + 7 * 8 + 5, "VERDICT: TIE")
    with fault_server(script) as server:
        first = start_command(server.url, tmp_path)
        server.wait_for(62 + 3)
        first.kill()
        first.communicate()
        paid = script.answered.copy()
        script.is_killed.set()
        second = start_command(server.url, tmp_path)
        told, _ = second.communicate(timeout=120)

    assert second.returncode == 0
    assert "Model win rate: 50.00% " in told
    asked = Counter(request.question for request in server.requests)
    assert len(paid) == 62
    probe = paid[0]
    assert asked[probe] == 2
    assert all(asked[question] == 1 for question in paid[1:])
    assert len(asked) == 1 + 7 * 8 + 2 * 12


def prefer_the_model(request: Request) -> str:
    """Prefer the other answer to a reference; the canaries compare changed references."""
    is_reference = [
        f'"{name}": "reference' in request.question for name in ("answer_a", "answer_b")
    ]
    if is_reference[0] == is_reference[1]:
        return "VERDICT: TIE"
    return f"VERDICT: {'B' if is_reference[0] else 'A'}"


@pytest.mark.slow
def test_a_killed_command_stops_early_all_the_same_and_asks_nothing_twice(tmp_path: Path):
    write_model(tmp_path / "policy")
    rows = [{"prompt": f"w{i} w{i + 1}", "reference": f"reference {i}"} for i in range(60)]
    rows += [{"prompt": f"w{i} w{i + 2}", "reference": f"reference {i}"} for i in range(60)]
    write_rows(tmp_path / "eval.jsonl", rows)
    script = Holding(1 + 7 * 8 + 21, prefer_the_model)
    with fault_server(script) as server:
        first = start_command(server.url, tmp_path)
        server.wait_for(1 + 7 * 8 + 21 + 3)
        first.kill()
        first.communicate()
        paid = script.answered.copy()
        script.is_killed.set()
        second = start_command(server.url, tmp_path)
        told, _ = second.communicate(timeout=120)

    # The first batch of 32 pairs, all won, shows that the model is better. The result is
    # inconclusive all the same, because this judge falls for canaries.
    assert "Won 32, lost 0, tied 0" in told
    asked = Counter(request.question for request in server.requests)
    assert all(asked[question] == 1 for question in paid[1:])
    assert len(asked) == 1 + 7 * 8 + 2 * 32
