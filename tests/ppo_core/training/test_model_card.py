"""A card says what a person needs, and no more than may be public."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.reporting.sample_table import Completions
from ppo_core.training.model_card import push_folder, write_model_card
from tests.helpers.models.tiny import make_policy, make_tokenizer

TOKEN = "hf_thisIsASecret"


def card_of(folder: Path, **details) -> ModelCard:
    given = {"config": PPOConfig(), "base_model": "org/sft", "metrics": {}} | details
    return ModelCard.load(write_model_card(folder, **given))


# --- The card ---


def test_the_front_matter_is_read_by_the_hub(tmp_path: Path):
    card = card_of(tmp_path, dataset_name="org/tldr", model_name="ours", tags=["toy", "ppo"])
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "base_model": "org/sft",
        "datasets": ["org/tldr"],
        "model_name": "ours",
        "tags": ["ppo", "rlhf", "toy"],
    }


def test_one_tag_may_be_given_as_a_string(tmp_path: Path):
    assert card_of(tmp_path, tags="toy").data.tags == ["ppo", "rlhf", "toy"]


def test_a_card_without_a_name_takes_that_of_the_hub_or_of_the_folder(tmp_path: Path):
    assert card_of(tmp_path / "mine").data.model_name == "mine"
    assert card_of(tmp_path, config=PPOConfig(hub_model_id="me/cheer")).data.model_name == (
        "me/cheer"
    )


def test_settings_metrics_and_versions_are_in_the_card(tmp_path: Path):
    config = PPOConfig(kl_coef=0.123, reward_model_path="org/reward")
    text = card_of(
        tmp_path, config=config, metrics={"objective/scores": 1.23456789}, dataset_name="org/tldr"
    ).text
    for line in (
        r"| kl\_coef | 0.123 |",
        r"| cliprange\_high | None |",
        "| objective/scores | 1.23457 |",
        "| transformers | 5.",
        "org/reward",
        "org/tldr",
        "org/sft, trained with proximal policy optimization",
    ):
        assert line in text


def test_neither_the_token_nor_a_path_of_this_machine_is_in_the_card(tmp_path: Path):
    model = tmp_path / "sft model"
    model.mkdir()
    config = PPOConfig(
        hub_token=TOKEN,
        output_dir=str(tmp_path / "out"),
        run_name=str(tmp_path / "out"),
        sft_model_path="~/secret place/sft",
        reward_model_path=str(tmp_path / "reward"),
        deepspeed=r"C:\Users\me\zero.json",
        use_vllm=True,
        vllm_weights_dir="weights",
        vllm_server_base_url="http://me:canary-0123456789@server:8000",
    )
    card = card_of(
        tmp_path / "out",
        config=config,
        base_model=str(model),
        dataset_name=str(tmp_path / "prompts.json"),
        model_name=str(tmp_path / "out"),
    )
    written = card.content.replace("\\", "")
    for private in (TOKEN, "hub_token", str(tmp_path), "secret place", "Users", "canary"):
        assert private not in written
    for public in ("sft model, trained", "prompts.json", "zero.json", "| out |", "server:8000"):
        assert public in card.text
    assert card.data.base_model is None
    assert card.data.datasets is None


def test_a_folder_here_is_not_taken_for_a_model_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("out/sft").mkdir(parents=True)
    assert card_of(tmp_path, base_model="out/sft").data.base_model is None


def test_html_and_markup_in_names_are_shown_as_they_are(tmp_path: Path):
    card = card_of(tmp_path, model_name="<b>*x*|y</b>", base_model="<img src=x>")
    assert r"# &#60;b&#62;\*x\*&#124;y&#60;/b&#62;" in card.text
    assert "<img" not in card.text


def test_samples_cannot_leave_their_block(tmp_path: Path):
    response = "```\n# out\n````\n<script>\n`````"
    samples = Completions(["why?\x1b[2J", "q", "q", "unseen"], [response, *"abc"], [0.5] * 4)
    text = card_of(tmp_path, samples=samples).text
    assert f"\n``````text\n{response}\n``````\n" in text
    assert "\n```text\nwhy?[2J\n```\n" in text
    assert "unseen" not in text


def test_a_card_without_samples_has_no_section_for_them(tmp_path: Path):
    assert "Samples" not in card_of(tmp_path, samples=Completions([], [], [])).text
    assert "Samples" not in card_of(tmp_path).text


def test_the_lines_that_load_the_model_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_policy().save_pretrained(tmp_path / "cheer")
    make_tokenizer().save_pretrained(tmp_path / "cheer")
    text = card_of(tmp_path / "cheer").text
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    assert names["model"].config.model_type == "llama"
    assert names["tokenizer"].eos_token == "<eos>"


def test_an_encoder_decoder_is_loaded_as_one(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"is_encoder_decoder": true}')
    assert "AutoModelForSeq2SeqLM.from_pretrained" in card_of(tmp_path).text


# --- The hub ---


class Hub(ThreadingHTTPServer):
    """As much of the hub as creating a repository and committing small files needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, dict]] = []
        self.tokens: set[str | None] = set()
        self.files: dict[str, bytes] = {}
        self.refuse = False


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        if self.server.refuse:
            return self._answer(403, {"error": "no right to write here"})
        if self.path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            answer = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]
            return self._answer(200, {"files": answer})
        if self.path.endswith("/commit/main"):
            return self._commit([json.loads(line) for line in body.splitlines()])
        self.server.requests.append((self.path, json.loads(body)))
        return self._answer(200, {"url": f"{self.server.url}/me/cheer", "errors": []})

    def do_GET(self) -> None:
        self._answer(404, {"error": "no such repository"})

    def _commit(self, lines: list[dict]) -> None:
        for line in lines:
            if line["key"] == "header":
                self.server.requests.append((self.path, line["value"]))
            else:
                content = base64.b64decode(line["value"]["content"])
                self.server.files[line["value"]["path"]] = content
        commit = {"commitUrl": f"{self.server.url}/me/cheer/commit/abc", "commitOid": "abc"}
        self._answer(200, commit)

    def _answer(self, status: int, answer: dict) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *details) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def push(folder: Path, repo_id: str = "cheer") -> str:
    return push_folder(folder, repo_id=repo_id, token=TOKEN, private=True, commit_message="done")


def a_trained_folder(path: Path) -> Path:
    write_model_card(path, config=PPOConfig(), base_model="org/sft", metrics={})
    (path / "model.safetensors").write_bytes(b"\0weights")
    for private in ("checkpoint-10", ".checkpoint-20.partial", "policies/4", "completions"):
        (path / private).mkdir(parents=True)
        (path / private / "policy.safetensors").write_bytes(b"much")
    return path


def test_only_the_policy_and_its_card_are_uploaded(tmp_path: Path, hub: Hub):
    folder = a_trained_folder(tmp_path)
    assert push(folder) == f"{hub.url}/me/cheer/commit/abc"
    assert hub.files == {
        "README.md": (folder / "README.md").read_bytes(),
        "model.safetensors": b"\0weights",
    }
    requests = dict(hub.requests)
    assert requests["/api/repos/create"]["name"] == "cheer"
    assert requests["/api/repos/create"]["visibility"] == "private"
    assert requests["/api/models/me/cheer/commit/main"]["summary"] == "done"
    assert hub.tokens == {f"Bearer {TOKEN}"}


def test_a_refusal_says_what_and_where_and_what_to_do(tmp_path: Path, hub: Hub):
    hub.refuse = True
    with pytest.raises(TrainingError, match=r"(?s)not uploaded.*403.*no right.*again") as raised:
        push(a_trained_folder(tmp_path))
    assert str(tmp_path) in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_a_hub_that_is_not_there_is_said_so(tmp_path: Path, hub: Hub):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(TrainingError, match=rf"(?s)not uploaded.*{hub.url}.*push again"):
        push(a_trained_folder(tmp_path))


def test_an_impossible_name_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"hub_model_id='a/b/c' is not a valid repository name"):
        push(tmp_path, "a/b/c")
