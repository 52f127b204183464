"""No HTTP client of ours follows a redirect, or reads a reply without end."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.judges.openai_model import OpenAIModel
from pipeline.registry.fetch_policy import find_policy
from pipeline.settings.environment import DEFAULTS
from pipeline.settings.judge_config import JudgingConfig
from pipeline.tracking.mlflow_client import check_registry
from ppo_core.errors import JudgeError, PPOError, TrainingError
from ppo_core.io.http_client import MAX_REPLY_BYTES
from ppo_core.rollout.vllm_client import VLLMServer
from serving.champion import champion_version
from tests.helpers.servers.fault_server import Behavior, drip, fault_server, respond
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.redirects import redirecting_server

STATUSES = (301, 302, 303, 307, 308)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-0123456789")
    monkeypatch.setenv("VLLM_API_KEY", "canary-0123456789")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask_judge(url: str) -> None:
    OpenAIModel("model", JudgingConfig(base_url=f"{url}/v1", retries=0)).probe()


def ask_vllm(url: str) -> None:
    VLLMServer(url, timeout=5, at_once=1).check([1, 2], 8)


def load_into_vllm(url: str) -> None:
    VLLMServer(url, timeout=5, at_once=1).load(Path("weights"))


def as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MLFLOW_ALLOW_HTTP_REDIRECTS"
    monkeypatch.setenv(name, DEFAULTS[name])


def check_mlflow(url: str) -> None:
    with tracking_to(url), pytest.MonkeyPatch.context() as patch:
        as_a_command(patch)
        check_registry("policy")


def download_from_mlflow(url: str) -> None:
    with tracking_to(url), pytest.MonkeyPatch.context() as patch:
        as_a_command(patch)
        find_policy("models:/policy/1", Path("unused"))


def serve_champion(url: str) -> None:
    with tracking_to(url):
        champion_version("policy")


CLIENTS = (ask_judge, ask_vllm, load_into_vllm, check_mlflow, download_from_mlflow, serve_champion)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_redirect_ends_the_request(client: Callable[[str], None], status: int):
    with redirecting_server(status) as server, pytest.raises(PPOError, match=str(status)):
        client(server.url)

    assert server.asked
    assert server.arrived == []


@pytest.mark.parametrize("client", [ask_judge, ask_vllm], ids=["judging.base_url", "vllm_server"])
def test_the_message_names_the_setting_to_change(client: Callable[[str], None]):
    setting = "judging.base_url" if client is ask_judge else "vllm_server_base_url"
    with redirecting_server(307) as server, pytest.raises(PPOError, match=setting):
        client(server.url)


BOMB = gzip.compress(b" " * MAX_REPLY_BYTES, compresslevel=1)


def compressed_reply(handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.end_headers()
    handler.wfile.write(BOMB)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        pytest.param(respond(200, " " * (MAX_REPLY_BYTES + 1)), "more than", id="too large"),
        pytest.param(respond(500, " " * (MAX_REPLY_BYTES + 1)), "more than", id="too large error"),
        pytest.param(compressed_reply, "compresses", id="compressed"),
    ],
)
@pytest.mark.parametrize("error", [JudgeError, TrainingError])
def test_a_large_reply_is_not_read_to_its_end(reply: Behavior, message: str, error: type[PPOError]):
    with fault_server([reply]) as server, pytest.raises(error, match=message):
        if error is JudgeError:
            ask_judge(server.url.removesuffix("/v1"))
        else:
            load_into_vllm(server.url.removesuffix("/v1"))


def test_a_reply_of_vllm_that_drips_ends_at_the_timeout():
    with fault_server([drip]) as server, pytest.raises(TrainingError, match=r"0\.3 seconds"):
        VLLMServer(server.url.removesuffix("/v1"), timeout=0.3, at_once=1).load(Path("weights"))


def test_a_usual_reply_is_read():
    body = {"choices": [{"message": {"content": "A"}, "finish_reason": "stop"}]}
    with fault_server([respond(200, json.dumps(body))]) as server:
        ask_judge(server.url.removesuffix("/v1"))
