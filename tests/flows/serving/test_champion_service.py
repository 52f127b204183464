"""The example service, as a process: it follows the alias, and no request notices."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from mlflow import MlflowClient
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import feedback
from flows.champion import Champion
from ppo_core.data.encode_prompts import response_text
from serving.manifest import write_manifest
from tests.flows.serving.test_champion import change_a_byte
from tests.helpers.models.tiny import make_policy, make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import (
    MlflowServer,
    free_port,
    mlflow_server,
    wait_until_answering,
)
from tests.helpers.slow_cases import slow

NAME = "rlhf-policy"
SERVICE = ROOT / "docs" / "champion_service.py"
PROMPTS = ("w1 w2 w3", "w7 w5")
LONG = 2000
"""Tokens of an answer that takes long enough to see a swap while it is streamed."""

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} w9 {% endfor %}"
    "{% if add_generation_prompt %}w8{% endif %}"
)

pytestmark = pytest.mark.timeout(600)


def write_version(folder: Path, *, seed: int) -> Path:
    """A policy that answers with as many tokens as it may."""
    model, tokenizer = make_policy(seed=seed), make_tokenizer()
    model.config.max_position_embeddings = 4096
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "components" / "tokenizer")
    return folder


def direct_answer(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """What the model says to a message of the user when it is loaded by hand."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = make_tokenizer()(f"{prompt} w9 w8", return_tensors="pt")["input_ids"]
    tokens = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0, ids.shape[1] :]
    return response_text(make_tokenizer(), ids[0].tolist(), tokens.tolist())


@dataclass
class Registry:
    """A registered model on a server of its own, which hands out the artifacts itself."""

    server: MlflowServer
    client: MlflowClient

    def register(self, folder: Path, *, name: str = NAME) -> tuple[str, Path]:
        """A version of these files: its number, and where the store keeps them."""
        digest = write_manifest(folder)
        model_id = self.client.create_logged_model("0").model_id
        self.client.log_model_artifacts(model_id, str(folder))
        self.client.finalize_logged_model(model_id, "READY")
        if not self.client.search_registered_models(f"name = '{name}'"):
            self.client.create_registered_model(name)
        made = self.client.create_model_version(
            name, f"models:/{model_id}", tags={"manifest": digest}, model_id=model_id
        )
        place = self.client.get_logged_model(model_id).artifact_location
        below = place.removeprefix("mlflow-artifacts:/")
        return str(made.version), self.server.folder / "mlartifacts" / below

    def promote(self, version: str) -> None:
        self.client.set_registered_model_alias(NAME, "champion", version)


@dataclass
class Service:
    """The example as a process."""

    url: str
    log: Path

    def ask(self, prompt: str, **question: Any) -> requests.Response:
        body = {"prompt": prompt, "max_new_tokens": 8, **question}
        return requests.post(f"{self.url}/generate", json=body, timeout=120)

    def version(self) -> str:
        return requests.get(f"{self.url}/health", timeout=30).json()["version"]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 200
        while not holds():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def wait_for(self, version: str) -> None:
        self.wait_until(lambda: self.version() == version)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with (
        mlflow_server(tmp_path_factory.mktemp("mlflow"), "mlflow-artifacts:/") as server,
        tracking_to(server.url),
    ):
        yield Registry(server, MlflowClient())


@pytest.fixture(scope="module")
def versions(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two good versions, 1 and 2, and what they were made of."""
    folders = [write_version(tmp_path_factory.mktemp("good"), seed=seed) for seed in (1, 2)]
    return {registry.register(folder)[0]: folder for folder in folders}


@pytest.fixture(scope="module")
def service(
    registry: Registry, versions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    registry.promote("1")
    home = tmp_path_factory.mktemp("service")
    port, log = free_port(), home / "log"
    process = subprocess.Popen(
        [*command(NAME), "--port", str(port), "--poll-seconds", "0.1", "--record"],
        env=environment(registry, home),
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until_answering(f"http://127.0.0.1:{port}/health", process, log)
        yield Service(f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait()


def command(name: str) -> list[str]:
    return [sys.executable, str(SERVICE), name]


def environment(registry: Registry, home: Path) -> dict[str, str]:
    return os.environ | {
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "MLFLOW_TRACKING_URI": registry.server.url,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def serving_one(registry: Registry, service: Service) -> Service:
    """The service while version 1 is champion."""
    registry.promote("1")
    service.wait_for("1")
    return service


# --- Answers -----------------------------------------------------------------------


def test_greedy_answers_are_those_of_the_model_loaded_by_hand(serving_one, versions):
    for prompt in PROMPTS:
        expected = direct_answer(versions["1"], prompt, 8)
        plain = serving_one.ask(prompt)
        assert (plain.json()["version"], plain.json()["text"]) == ("1", expected)
        assert serving_one.ask(prompt, temperature=0).json()["text"] == expected
        streamed = serving_one.ask(prompt, stream=True)
        assert (streamed.status_code, streamed.text) == (200, expected)
        assert plain.headers["X-Model-Version"] == streamed.headers["X-Model-Version"] == "1"


PIECES = ["▁▁", "x", "<0x0A>", "▁▁▁", "y", "<0xC3>", "<0xA9>", "▁z", "<0xF0>", "<0x9F>"]
"""Two lines, the second one indented; at the end, two of the four bytes of a character."""


def champion_that_says(pieces: list[str]) -> Champion:
    """A model that answers `hi` with these different pieces, with a tokenizer like Llama 2's."""
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", "</s>", "▁hi", *pieces])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.normalizer = normalizers.Prepend("▁")
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    size, last = 16, len(vocabulary) - 1
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    following = {2: 3, last: 1} | {number: number + 1 for number in range(3, last)}
    with torch.no_grad():
        # Without attention and MLP, the next token depends only on the last token.
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.get_input_embeddings().weight.copy_(torch.eye(size))
        for token, next_token in following.items():
            model.lm_head.weight[next_token, token] = 1.0
    model.generation_config.max_new_tokens = 20
    return Champion(name=NAME, version="1", model=model, tokenizer=tokenizer)


def plain_and_streamed(champion: Champion) -> tuple[str, list[str]]:
    """Return the service's answer to `hi`, and the pieces of its stream."""
    spec = spec_from_file_location("champion_service", SERVICE)
    assert spec is not None and spec.loader is not None
    service = module_from_spec(spec)
    spec.loader.exec_module(service)
    question = service.Question(prompt="hi")
    ids = service.encode(champion, question)
    assert ids.tolist() == [[2]]
    plain = service.generate(champion, ids, question)
    return plain, [*service.stream(champion, ids, question, threading.Event())]


def test_plain_and_streamed_answers_keep_every_space():
    plain, pieces = plain_and_streamed(champion_that_says(PIECES))
    assert plain == "".join(pieces) == "  x\n   yé z\ufffd\ufffd"
    assert pieces == ["  ", "x", "\n", "   ", "y", "é", " z", "\ufffd\ufffd"]


def test_a_stop_token_that_is_not_special_is_no_part_of_the_answer():
    champion = champion_that_says(PIECES)
    stop = champion.tokenizer.convert_tokens_to_ids("▁z")
    champion.model.generation_config.eos_token_id = stop
    plain, pieces = plain_and_streamed(champion)
    assert plain == "".join(pieces) == "  x\n   yé"


def test_messages_are_rendered_by_the_chat_template(serving_one, versions):
    messages = [{"role": "user", "content": "w4"}]
    answered = serving_one.ask(None, messages=messages)
    assert answered.json()["text"] == direct_answer(versions["1"], "w4", 8)


def test_a_temperature_samples(serving_one):
    texts = {serving_one.ask("w1", temperature=3.0).json()["text"] for _ in range(6)}
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"prompt": None}, "Give either a prompt or messages"),
        ({"messages": [{"role": "user", "content": "w1"}]}, "Give either a prompt or messages"),
        ({"prompt": ""}, "A question with an empty prompt cannot be answered."),
        ({"max_new_tokens": 4096}, "5 tokens and an answer of up to 4096 do not fit"),
        (
            {"prompt": None, "messages": [{"role": "user"}]},
            "must have the text fields 'role' and 'content'",
        ),
        *(
            ({"temperature": value}, f"temperature={value:g} cannot be used. Give 0, which always")
            for value in (-1, 1e-40, 0.009, math.inf, math.nan)
        ),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(question, reason, serving_one):
    body = {"prompt": "w1 w2 w3", "max_new_tokens": 8, **question}
    # Unlike `requests.post(json=...)`, `json.dumps` writes infinity.
    url, headers = f"{serving_one.url}/generate", {"content-type": "application/json"}
    refused = requests.post(url, data=json.dumps(body), headers=headers, timeout=120)
    assert refused.status_code == 422
    assert reason in refused.text
    assert serving_one.ask("w1", temperature=0.01).ok


@pytest.mark.slow
def test_clients_that_leave_do_not_keep_others_waiting(serving_one):
    body = {"prompt": "w1", "max_new_tokens": LONG, "stream": True}
    url = f"{serving_one.url}/generate"
    began = time.monotonic()
    assert requests.post(url, json=body, timeout=120).ok
    one_answer = time.monotonic() - began
    began = time.monotonic()
    for _ in range(10):
        with requests.post(url, json=body, stream=True, timeout=120) as left:
            assert left.status_code == 200
    assert serving_one.ask("w1").ok
    assert time.monotonic() - began < 5 * one_answer  # it would be 10, were they all made


# --- Another champion --------------------------------------------------------------


@pytest.mark.slow
def test_no_request_fails_while_the_champion_changes_and_changes_back(
    registry, serving_one, versions, tmp_path
):
    folder = write_version(tmp_path / "three", seed=3)
    refused, place = registry.register(folder)
    change_a_byte(place / "model" / "model.safetensors")
    expected = {
        (number, prompt): direct_answer(folder, prompt, 24)
        for number, folder in versions.items()
        for prompt in PROMPTS
    }
    answers: list[tuple[int, str | None, str, str]] = []
    errors: list[requests.RequestException] = []
    stop = threading.Event()

    def hammer(prompt: str, *, stream: bool) -> None:
        while not stop.is_set():
            try:
                got = serving_one.ask(prompt, max_new_tokens=24, stream=stream)
            except requests.RequestException as error:
                errors.append(error)
                return
            text = got.text if stream or not got.ok else got.json()["text"]
            answers.append((got.status_code, got.headers.get("X-Model-Version"), prompt, text))

    def more_answers(count: int) -> None:
        enough = len(answers) + count
        serving_one.wait_until(lambda: len(answers) >= enough or bool(errors))

    hammers = [
        threading.Thread(target=hammer, args=(prompt,), kwargs={"stream": stream})
        for prompt in PROMPTS
        for stream in (False, True)
    ]
    for thread in hammers:
        thread.start()
    try:
        more_answers(8)
        for version in ("2", "1"):
            registry.promote(version)
            serving_one.wait_for(version)
            more_answers(8)
        registry.promote(refused)
        serving_one.wait_until(
            lambda: f"Version {refused} of '{NAME}' is refused" in serving_one.log.read_text()
        )
        more_answers(8)
        assert serving_one.version() == "1"
        registry.promote("2")
        serving_one.wait_for("2")
        more_answers(12)
    finally:
        stop.set()
        for thread in hammers:
            thread.join()

    assert errors == []
    assert {status for status, *_ in answers} == {200}
    for _, version, prompt, text in answers:
        assert text == expected[version, prompt]
    order = [version for _, version, *_ in answers]
    assert order[0] == "1"
    assert order[-1] == "2"
    log = serving_one.log.read_text()
    assert log.count(f"Version {refused} of '{NAME}' is refused") == 1
    assert "Version 1 keeps serving. Version" in log
    assert "'model/model.safetensors' was changed" in log


@pytest.mark.slow
def test_a_stream_that_began_before_a_swap_ends_on_its_version(registry, serving_one, versions):
    body = {"prompt": "w1 w2", "max_new_tokens": LONG, "stream": True}
    with requests.post(
        f"{serving_one.url}/generate", json=body, stream=True, timeout=120
    ) as streamed:
        pieces = streamed.iter_content(chunk_size=None)
        text = next(pieces).decode()
        registry.promote("2")
        serving_one.wait_for("2")
        assert len(text.split()) < LONG - 100
        text += b"".join(pieces).decode()
        assert streamed.headers["X-Model-Version"] == "1"
    assert text == direct_answer(versions["1"], "w1 w2", LONG)


@pytest.mark.parametrize("trouble", ["not finite", "does not fit"])
def test_a_version_that_cannot_answer_does_not_take_over(trouble, registry, serving_one, tmp_path):
    folder = write_version(tmp_path / "bad", seed=4)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(folder / "model")
    if trouble == "does not fit":
        model.config.hidden_size = 64
        model.config.save_pretrained(folder / "model")
    bad, _ = registry.register(folder)
    registry.promote(bad)
    said = {
        "not finite": f"Version {bad} of '{NAME}' gives logits that are not finite",
        "does not fit": f"Version {bad} of '{NAME}' is unchanged since it was registered",
    }[trouble]
    serving_one.wait_until(lambda: said in serving_one.log.read_text())
    assert serving_one.ask("w1").json()["version"] == "1"
    registry.promote("2")
    serving_one.wait_for("2")


@pytest.mark.slow
def test_a_registry_that_is_down_disturbs_no_request(registry, serving_one):
    before = serving_one.log.read_text()
    registry.server.kill()
    try:
        serving_one.wait_until(
            lambda: "gives no answer" in serving_one.log.read_text().removeprefix(before)
        )
        for stream in (False, True):
            assert serving_one.ask("w1", stream=stream).status_code == 200
        assert serving_one.version() == "1"
    finally:
        registry.server.start()
    registry.promote("2")
    serving_one.wait_for("2")


# --- No champion to begin with -----------------------------------------------------


@pytest.mark.parametrize("there_is", [*slow("no alias", "a changed byte")])
def test_without_a_champion_it_does_not_start(there_is, registry, versions, tmp_path):
    name = there_is.replace(" ", "-")
    number, place = registry.register(versions["1"], name=name)
    said = f"champion_service: '{name}' has no version with the alias 'champion'"
    if there_is == "a changed byte":
        registry.client.set_registered_model_alias(name, "champion", number)
        change_a_byte(place / "model" / "model.safetensors")
        said = f"champion_service: Version {number} of '{name}' is refused"
    ended = subprocess.run(
        command(name), env=environment(registry, tmp_path), capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


# --- Feedback ----------------------------------------------------------------------


@pytest.mark.slow
def test_users_judge_recorded_answers_and_the_feedback_becomes_training_data(
    serving_one, tmp_path: Path
):
    def judge(**opinion) -> requests.Response:
        return requests.post(f"{serving_one.url}/feedback", json=opinion, timeout=60)

    plain = serving_one.ask("w1 w2")
    streamed = serving_one.ask("w3", stream=True)
    chat = serving_one.ask(None, messages=[{"role": "user", "content": "w4"}])
    ids = [reply.headers["X-Answer-Id"] for reply in (plain, streamed, chat)]
    assert ids[0] == plain.json()["answer"]
    # Traces are sent in the background.
    serving_one.wait_until(lambda: judge(answer=ids[0], user="ann", liked=True).ok)
    serving_one.wait_until(lambda: judge(answer=ids[1], user="bob", correction="w5 w6").ok)
    serving_one.wait_until(lambda: judge(answer=ids[2], user="bob", liked=False).ok)
    refused = [judge(answer="tr-0", user="ann", liked=True), judge(answer=ids[0], user="ann")]
    refused.append(judge(answer=ids[0], user="", liked=True))
    assert [reply.status_code for reply in refused] == [422] * 3
    assert feedback.main(["collect", NAME, "--output-dir", str(tmp_path)]) == 0
    rows = map(json.loads, (tmp_path / "feedback.jsonl").read_text().splitlines())
    assert [(row["prompt"], row["chosen"], row["rejected"], row["version"]) for row in rows] == [
        ("w1 w2", plain.json()["text"], None, "1"),
        ("w3", "w5 w6", streamed.text, "1"),
        ([{"role": "user", "content": "w4"}], None, chat.json()["text"], "1"),
    ]
