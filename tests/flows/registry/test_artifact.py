"""What is registered is the policy that was trained, whole, and decodes as it was judged."""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest
import requests
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pipeline.registry.artifact import VersionContents, write_artifact
from pipeline.settings.decoding import Decoding
from pipeline.tracking.mlflow_client import connect
from ppo_core.errors import ModelError
from ppo_core.training.answer_prompts import answer_prompts
from serving.manifest import check_folder
from tests.helpers.models.chat import make_chat_tokenizer, say, write_parrot
from tests.helpers.models.tiny import EOS, make_policy, make_tokenizer
from tests.helpers.servers.mlflow_store import tracking_to, write_database
from tests.helpers.servers.servers import free_port, wait_until_answering

PROMPTS = ["w1 w2 w3", "w7", "w20 w21 w22 w23 w24 w25", "w40 w3"]
LENGTH = 12
GREEDY = Decoding(response_length=LENGTH, temperature=0)


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory) -> Iterator[None]:
    with tracking_to(write_database(tmp_path_factory.mktemp("mlflow") / "mlflow.db")):
        connect()
        yield


def write_policy(folder: Path, *, dtype=torch.float32, tokenizer=None, **saving: Any) -> Path:
    """A policy as a trainer saves it, with the leftovers of a base model in its settings."""
    model = make_policy().to(dtype)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, repetition_penalty=5.0, eos_token_id=[EOS, 7]
    )
    model.save_pretrained(folder, **saving)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def write(policy: Path, folder: Path, **changed: Any) -> str:
    given = {
        "name": "rlhf-policy",
        "decoding": GREEDY,
        "example": "w1 w2",
        "card": "# A card",
    }
    contents = VersionContents(**(given | changed))
    return write_artifact(policy, folder, contents, run_id="0" * 32, model_id="m-" + "0" * 32)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def artifact(policy: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    write(policy, folder)
    return folder


@pytest.fixture(scope="module")
def chat_artifact(tmp_path_factory) -> Path:
    policy = Path(write_parrot(tmp_path_factory.mktemp("parrot"), [55, 56, 57, 58, EOS]))
    folder = tmp_path_factory.mktemp("chat")
    write(policy, folder)
    return folder


def judged(policy: Path, prompts: list[Any], decoding: Decoding = GREEDY) -> list[str]:
    """The answers that a judge reads."""
    return answer_prompts(
        AutoModelForCausalLM.from_pretrained(policy),
        AutoTokenizer.from_pretrained(policy),
        prompts,
        response_length=decoding.response_length,
        temperature=decoding.temperature,
        seed=0,
        stop=decoding.stop_token,
        stop_token_id=decoding.stop_token_id,
    ).texts


def answers_of_transformers(folder: Path, prompts: list[str]) -> list[str]:
    """As anybody asks a folder, knowing nothing but transformers; all prompts at once."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "components/tokenizer", padding_side="left")
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    ids = model.generate(**batch)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def in_every_way(folder: Path, prompts: list[str]) -> dict[str, list[str]]:
    """Answers of one version by all ways to load it, one prompt after another and all at once."""
    pipeline = mlflow.transformers.load_model(str(folder))
    loaded = mlflow.pyfunc.load_model(str(folder))
    return {
        "transformers": answers_of_transformers(folder, prompts),
        "pipeline": _texts(pipeline(prompts, return_full_text=False)),
        "pipeline, batch": _texts(pipeline(prompts, return_full_text=False, batch_size=3)),
        "pyfunc": loaded.predict(prompts),
        "pyfunc, one by one": [loaded.predict([prompt])[0] for prompt in prompts],
    }


def _texts(replies: list[list[dict[str, str]]]) -> list[str]:
    return [reply[0]["generated_text"] for reply in replies]


def words(texts: list[str]) -> list[list[str]]:
    return [text.split() for text in texts]


def test_every_way_to_load_a_version_answers_word_for_word_as_the_policy_did(
    policy: Path, artifact: Path
):
    expected = words(judged(policy, PROMPTS))
    assert max(map(len, expected)) == LENGTH
    for way, texts in in_every_way(artifact, PROMPTS).items():
        assert words(texts) == expected, way


def test_an_answer_ends_at_the_stop_token_of_the_training_and_not_at_the_models_own(
    policy: Path, tmp_path: Path
):
    first = judged(policy, PROMPTS)[0].split()
    stop = AutoTokenizer.from_pretrained(policy).convert_tokens_to_ids(first[3])
    decoding = Decoding(response_length=LENGTH, temperature=0, stop_token_id=stop)
    write(policy, tmp_path / "version", decoding=decoding)
    shorter = judged(policy, PROMPTS, decoding)
    assert 0 < len(shorter[0].split()) <= 3
    for texts in in_every_way(tmp_path / "version", PROMPTS).values():
        # A stop token that is a word is a part of what transformers decodes.
        assert [text.split(first[3])[0].split() for text in texts] == words(shorter)


def test_without_a_stop_token_an_answer_has_its_full_length(policy: Path, tmp_path: Path):
    write(policy, tmp_path / "ended")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ended/model")
    assert model.generation_config.eos_token_id == EOS
    decoding = Decoding(response_length=LENGTH, temperature=0, stop_token=None)
    write(policy, tmp_path / "endless", decoding=decoding)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "endless/model")
    assert model.generation_config.eos_token_id is None
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all logits are equal, and the first token is the pad
        assert model.generate(torch.tensor([[5, 6]])).shape == (1, 2 + LENGTH)


def test_sampling_is_by_default_that_of_the_judged_answers(policy: Path, tmp_path: Path):
    decoding = Decoding(response_length=5, temperature=0.7, top_k=0, top_p=0.9)
    write(policy, tmp_path / "version", decoding=decoding)
    settings = json.loads((tmp_path / "version/model/generation_config.json").read_text())
    wanted = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9}
    others = {"eos_token_id": EOS, "pad_token_id": 0}
    settings.pop("transformers_version")
    assert settings == wanted | others
    model = mlflow.models.Model.load(str(tmp_path / "version"))
    parameters = {spec.name: spec.default for spec in model.signature.params.params}
    assert parameters == wanted


def test_a_caller_may_ask_for_other_than_the_judged_decoding(artifact: Path):
    loaded = mlflow.pyfunc.load_model(str(artifact))
    whole = loaded.predict(PROMPTS)
    short = loaded.predict(PROMPTS, params={"max_new_tokens": 2})
    assert words(short) == [text.split()[:2] for text in whole]
    torch.manual_seed(0)
    sampled = loaded.predict(PROMPTS, params={"do_sample": True, "temperature": 5.0})
    assert sampled != whole


def test_greedy_settings_raise_no_contradiction_in_transformers(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    mlflow.pyfunc.load_model(str(artifact)).predict(PROMPTS)
    assert not [line for line in caplog.messages if "generation flags" in line]
    GenerationConfig.from_pretrained(artifact / "model").validate(strict=True)


def test_half_precision_and_shards_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy = write_policy(tmp_path / "policy", dtype=torch.bfloat16, max_shard_size="10KB")
    assert len(list(policy.glob("*.safetensors"))) > 1
    monkeypatch.setenv("MLFLOW_HUGGINGFACE_MODEL_MAX_SHARD_SIZE", "10KB")
    folder = tmp_path / "version"
    write(policy, folder)
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    before = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert mlflow.transformers.load_model(str(folder)).model.dtype == torch.bfloat16
    expected = words(judged(policy, PROMPTS))
    assert words(mlflow.pyfunc.load_model(str(folder)).predict(PROMPTS)) == expected


def test_the_manifest_has_the_digest_of_every_other_file(policy: Path, tmp_path: Path):
    (tmp_path / "settings.toml").write_text("seed = 1")
    folder = tmp_path / "version"
    digest = write(policy, folder, settings=tmp_path / "settings.toml")
    manifest = (folder / "manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == digest
    files = json.loads(manifest)["files"]
    assert list(files) == sorted(files)
    assert files == {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("README.md", "manifest.json")
    }
    assert {
        *("MLmodel", "requirements.txt", "input_example.json", "settings.toml"),
        *("model/config.json", "model/generation_config.json", "model/model.safetensors"),
        *("components/tokenizer/tokenizer.json", "components/tokenizer/tokenizer_config.json"),
    } <= files.keys()
    assert (folder / "README.md").read_text() == "# A card"
    assert tomllib.loads((folder / "settings.toml").read_text()) == {"seed": 1}


def test_no_pickle_no_code_and_no_path_of_this_machine_is_in_a_version(
    policy: Path, artifact: Path, chat_artifact: Path
):
    for path in [*artifact.rglob("*"), *chat_artifact.rglob("*")]:
        if path.is_file():
            content = path.read_bytes()
            assert path.suffix in {".json", ".yaml", ".txt", ".md", ".safetensors", ".jinja", ""}
            assert not content.startswith((b"\x80", b"PK"))
            assert str(policy).encode() not in content
            assert b"auto_map" not in content
            assert b"huggingface.co" not in content


def test_a_version_passes_the_checks_of_its_consumer(policy: Path, tmp_path: Path):
    tokenizer = make_chat_tokenizer()
    chat_policy = write_policy(tmp_path / "chat", tokenizer=tokenizer)
    for number, source in enumerate((policy, chat_policy)):
        folder = tmp_path / f"version-{number}"
        check_folder(folder, write(source, folder))


def test_the_adapter_is_kept_beside_the_policy_that_it_is_merged_into(tmp_path: Path):
    policy = write_policy(tmp_path / "policy")
    (policy / "adapter").mkdir()
    (policy / "adapter/adapter_config.json").write_text('{"r": 4}')
    folder = tmp_path / "version"
    write(policy, folder)
    assert (folder / "adapter/adapter_config.json").read_text() == '{"r": 4}'
    assert "adapter/adapter_config.json" in (folder / "manifest.json").read_text()
    assert not (folder / "model/adapter").exists()
    assert words(mlflow.pyfunc.load_model(str(folder)).predict(PROMPTS)) == words(
        judged(policy, PROMPTS)
    )


def test_the_requirements_are_pinned_to_versions_that_an_index_has(artifact: Path):
    requirements = (artifact / "requirements.txt").read_text().split()
    names = {line.partition("==")[0] for line in requirements}
    assert names == {"mlflow", "torch", "transformers", "accelerate"}
    assert all("==" in line and "+" not in line for line in requirements)
    assert yaml.safe_load((artifact / "MLmodel").read_text())["run_id"] == "0" * 32


def test_a_chat_model_answers_messages(chat_artifact: Path):
    loaded = mlflow.pyfunc.load_model(str(chat_artifact))
    (reply,) = loaded.predict({"messages": say("w1 w2")})
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "VERDICT: A B"}
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 4
    (reply,) = loaded.predict({"messages": say("w1", "w2", "w3"), "max_tokens": 2})
    assert reply["choices"][0]["message"]["content"] == "VERDICT: A"
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_pipeline_returns_the_answer_alone_only_if_it_is_asked_to(
    artifact: Path, chat_artifact: Path
):
    for folder, prompt in ((artifact, PROMPTS[0]), (chat_artifact, say("w1 w2"))):
        pipeline = mlflow.transformers.load_model(str(folder))
        ((alone,), (whole,)) = pipeline(prompt, return_full_text=False), pipeline(prompt)
        if folder == artifact:
            assert whole["generated_text"] == prompt + alone["generated_text"]
        else:
            assert alone["generated_text"] == "VERDICT: A B"
            assert whole["generated_text"][:-1] == prompt


def test_a_chat_model_reads_the_tokens_that_it_was_trained_on(tmp_path: Path):
    tokenizer = make_chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "w0"})
    tokenizer._tokenizer.post_processor = starts_with("w0", 3)
    policy = write_policy(tmp_path / "policy", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(policy)("w5")["input_ids"] == [3, 8]
    write(policy, tmp_path / "version")
    conversations = [say("w1 w2"), say("w3", "w4 w5", "w6")]
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "version"))
    replies = [loaded.predict({"messages": messages})[0] for messages in conversations]
    texts = [reply["choices"][0]["message"]["content"] for reply in replies]
    assert words(texts) == words(judged(policy, conversations))


def starts_with(token: str, number: int) -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])


def test_an_example_of_messages_is_kept_and_needs_a_chat_template(
    policy: Path, chat_artifact: Path, tmp_path: Path
):
    parrot = Path(write_parrot(tmp_path / "parrot", [55, 56, EOS]))
    write(parrot, tmp_path / "version", example=say("w1"))
    kept = json.loads((tmp_path / "version/input_example.json").read_text())
    assert kept == {"messages": say("w1")}
    kept = json.loads((chat_artifact / "input_example.json").read_text())
    assert kept == {"messages": [{"role": "user", "content": "w1 w2"}]}
    with pytest.raises(ModelError, match="no chat template"):
        write(policy, tmp_path / "refused", example=say("w1"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"cannot be registered. No model can be loaded"):
        write(tmp_path / "empty", tmp_path / "version")


@contextmanager
def serving(folder: Path, scratch: Path) -> Iterator[str]:
    """`mlflow models serve` of a folder, in a process of its own that knows no other."""
    port = free_port()
    log = scratch / "serve.log"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # MLflow calls uvicorn by name
    others = {"PATH": path, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "models", "serve", "--env-manager", "local"),
                *("--model-uri", str(folder), "--host", "127.0.0.1", "--port", str(port)),
                *("--workers", "1"),
            ],
            cwd=scratch,
            env=os.environ | others,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_answering(f"http://127.0.0.1:{port}/ping", process, log)
        yield f"http://127.0.0.1:{port}/invocations"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_served_policy_answers_prompts(policy: Path, artifact: Path, tmp_path: Path):
    expected = words(judged(policy, PROMPTS))
    with serving(artifact, tmp_path) as url:
        reply = requests.post(url, json={"inputs": PROMPTS}, timeout=60)
        short = requests.post(
            url, json={"inputs": PROMPTS, "params": {"max_new_tokens": 2}}, timeout=60
        )
        example = (artifact / "serving_input_example.json").read_text()
        headers = {"Content-Type": "application/json"}
        shown = requests.post(url, data=example, headers=headers, timeout=60)
    assert words(reply.json()["predictions"]) == expected
    assert words(short.json()["predictions"]) == [answer[:2] for answer in expected]
    assert words(shown.json()["predictions"]) == words(judged(policy, ["w1 w2"]))


@pytest.mark.slow
def test_a_served_chat_model_answers_messages(chat_artifact: Path, tmp_path: Path):
    with serving(chat_artifact, tmp_path) as url:
        reply = requests.post(url, json={"messages": say("w1 w2")}, timeout=60).json()
    (reply,) = reply if isinstance(reply, list) else [reply]
    assert reply["choices"][0]["message"]["content"] == "VERDICT: A B"
