"""Registered versions that would run code, lead out of their folder, or hold a broken model."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ppo_core.data import chat_template
from ppo_core.errors import ModelError
from serving.champion import champion_version, load_champion
from tests.helpers.runs.served_versions import NAME, register, write_version
from tests.helpers.servers.mlflow_store import tracking_to, write_database
from tests.helpers.slow_cases import slow
from tests.hostile.test_model_files import (
    POLICY_CASES,
    TOKENIZER_CASES,
    Spoil,
    change,
    index,
    write,
)
from tests.hostile.test_templates import BOMBS
from tests.hostile.test_tokenizer_files import TOKENIZERS

FURTHER_POLICIES: dict[str, Spoil] = {
    "an index to a neighbour": index("../components/other.safetensors"),
    "an index to a home": index("~/outside.safetensors"),
    "an index with a number": index(7),  # type: ignore[arg-type]
    **{
        f"auto_map that is {value!r}": change("config.json", auto_map=value)
        for value in (7, 1.5, True, [7], None, "evil.Evil")
    },
    **{
        f"{key} that is {value!r}": change("config.json", **{key: value})
        for key in ("hidden_size", "num_attention_heads", "vocab_size")
        for value in ([], {}, "32", 1.5)
    },
    "layers that are a list": change("config.json", num_hidden_layers=[2]),
    "a rotary base that is text": change("config.json", rope_parameters="default"),
    "a dtype that is none": change("config.json", dtype="evil"),
    "a dtype that is a list": change("config.json", dtype=[1]),
    "an encoder": change("config.json", is_encoder_decoder=True),
    "a model that scores": change("config.json", architectures=["LlamaForSequenceClassification"]),
}

FURTHER_TOKENIZERS: dict[str, Spoil] = {
    **{
        f"auto_map that is {value!r}": change("tokenizer_config.json", auto_map=value)
        for value in (7, 1.5)
    },
    "a class that is a number": change("tokenizer_config.json", tokenizer_class=7),
    "special tokens that are numbers": change("tokenizer_config.json", eos_token=7),
}


def force_manifest(folder: Path) -> str:
    """Write the manifest of a folder as an attacker would: nothing is refused."""
    files = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "README.md")
    }
    content = json.dumps({"files": files}).encode()
    (folder / "manifest.json").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("registry")
    uri = write_database(folder / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # artifacts will be here
        MlflowClient(uri).search_registered_models()
    return uri


@pytest.fixture
def client(database, tmp_path, monkeypatch) -> Iterator[MlflowClient]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail(f"asked: {words}"))
    with tracking_to(database):
        yield MlflowClient()


def refuses(client: MlflowClient, tmp_path: Path, part: str, spoil: Spoil) -> None:
    version = write_version(tmp_path / "registered" / "version")
    spoil(version / part)
    number, _ = register(client, version, tags={"manifest": force_manifest(version)})
    with pytest.raises(ModelError, match=f"ersion {number} of '{NAME}'"):
        load_champion(NAME, cache=tmp_path / "cache")
    assert not list(tmp_path.rglob("canary"))


# MLflow's stores hold neither links nor pipes.
POLICIES_OF_FOLDERS = {
    name: spoil
    for name, (spoil, _) in POLICY_CASES.items()
    if not name.startswith("a link") and name != "a pipe"
}


# By default those alone that no test of other folders has, here and below.
@pytest.mark.parametrize("case", [*FURTHER_POLICIES, *slow(*POLICIES_OF_FOLDERS)])
def test_a_champion_is_refused(case, client, tmp_path):
    spoil = (FURTHER_POLICIES | POLICIES_OF_FOLDERS)[case]
    refuses(client, tmp_path, "model", spoil)


TOKENIZERS_OF_FOLDERS = {
    name: spoil for name, (spoil, _) in TOKENIZER_CASES.items() if "link" not in name
} | {name: write("tokenizer.json", content) for name, content in TOKENIZERS.items()}


@pytest.mark.parametrize("case", [*FURTHER_TOKENIZERS, *slow(*TOKENIZERS_OF_FOLDERS)])
def test_a_champion_s_tokenizer_is_refused(case, client, tmp_path):
    spoil = (FURTHER_TOKENIZERS | TOKENIZERS_OF_FOLDERS)[case]
    refuses(client, tmp_path, "components/tokenizer", spoil)


@pytest.mark.parametrize("case", ["a long text", "a centred text", "an indented text"])
def test_a_champion_s_template_is_refused(case, client, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 1)
    refuses(client, tmp_path, "components/tokenizer", write("chat_template.jinja", BOMBS[case]))


@pytest.mark.parametrize(
    "address",
    ["postgresql+none://h/db", "postgresql://h/db", "postgresql+pg8000://h/db", "mysql://h/db",
     "mysql+pymysql://h/db", "mssql+pyodbc://h/db"],
)  # fmt: skip
def test_a_registry_without_its_driver_is_named(address):
    with (
        tracking_to(address, retries=1),
        pytest.raises(ModelError, match="gives no answer"),
    ):
        champion_version(NAME)
