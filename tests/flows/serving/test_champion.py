"""What a service loads: from real stores, refused where it is not what was registered."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from mlflow import MlflowClient
from transformers import PreTrainedModel

from ppo_core.errors import ModelError
from serving.champion import champion_version, fetch_champion, load_champion
from serving.manifest import MANIFEST, check_folder, write_manifest
from tests.helpers.models.tiny import make_policy, make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.runs.served_versions import NAME, register, write_version
from tests.helpers.servers.mlflow_store import tracking_to, write_database
from tests.helpers.servers.servers import mlflow_server, s3


def force_manifest(folder: Path, **files: str) -> str:
    """The manifest of a folder as somebody writes it who means harm: nothing is refused."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("manifest.json", "README.md"):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            files[path.relative_to(folder).as_posix()] = digest
    content = json.dumps({"files": files}).encode()
    (folder / "manifest.json").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def answer(model: Any, tokenizer: Any) -> list[int]:
    ids = tokenizer("w1 w2 w3", return_tensors="pt")["input_ids"]
    return model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return write_version(tmp_path / "version")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("registry")
    uri = write_database(folder / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # artifacts will be here
        MlflowClient(uri).search_registered_models()
    return uri


@pytest.fixture
def client(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MlflowClient]:
    """An MLflow without a server, in which `NAME` is free."""
    monkeypatch.chdir(tmp_path)
    with tracking_to(database):
        yield emptied()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    """A server whose artifacts are in S3, which its clients read themselves."""
    with (
        s3() as environment,
        mlflow_server(
            tmp_path_factory.mktemp("server"), "s3://artifacts/root", environment
        ) as running,
    ):
        yield running, environment


@pytest.fixture
def served(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    running, environment = server
    monkeypatch.chdir(tmp_path)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with tracking_to(running.url):
        yield emptied()


def emptied() -> MlflowClient:
    client = MlflowClient()
    for model in client.search_registered_models():
        client.delete_registered_model(model.name)
    return client


# --- What is loaded ----------------------------------------------------------------


class TestLoading:
    def test_the_champion_answers_as_the_registered_model_does(
        self, client, version: Path, tmp_path: Path
    ):
        number, _ = register(client, version)
        loaded = load_champion(NAME, cache=tmp_path / "cache")
        assert (loaded.name, loaded.version) == (NAME, number) == (NAME, champion_version(NAME))
        assert not loaded.model.training
        assert answer(loaded.model, loaded.tokenizer) == answer(make_policy(), make_tokenizer())

    def test_another_alias_or_version_is_taken_when_it_is_named(
        self, client, version: Path, tmp_path: Path
    ):
        first, _ = register(client, version)
        (version / "requirements.txt").write_text("torch\n")
        second, _ = register(client, version)
        client.set_registered_model_alias(NAME, "challenger", first)
        cache = tmp_path / "cache"
        assert champion_version(NAME, "challenger") == first
        found = [
            fetch_champion(NAME, cache=cache),
            fetch_champion(NAME, alias="challenger", cache=cache),
            fetch_champion(NAME, version=int(first), cache=cache),
        ]
        assert [fetched.version for fetched in found] == [second, first, first]
        assert found[1] == found[2]
        assert found[0].folder != found[1].folder

    def test_the_card_may_change_and_is_not_fetched(self, client, version, tmp_path):
        _, place = register(client, version)
        (Path(place) / "README.md").write_text("Promoted.\n")
        folder = fetch_champion(NAME, cache=tmp_path / "cache").folder
        assert {path.name for path in folder.iterdir()} == {
            "MLmodel", "components", "manifest.json", "model", "requirements.txt"
        }  # fmt: skip

    def test_a_version_made_from_the_files_of_a_run_is_found(
        self, client, version: Path, tmp_path: Path
    ):
        digest = write_manifest(version)
        run = client.create_run("0").info.run_id
        client.log_artifacts(run, str(version), "policy")
        client.create_registered_model(NAME)
        client.create_model_version(NAME, f"runs:/{run}/policy", tags={"manifest": digest})
        assert fetch_champion(NAME, version=1, cache=tmp_path / "cache").manifest == digest

    def test_a_copy_of_a_version_in_another_registered_model_is_found(
        self, client, version: Path, tmp_path: Path
    ):
        number, _ = register(client, version)
        client.copy_model_version(f"models:/{NAME}/{number}", "production")
        copied = fetch_champion("production", version=1, cache=tmp_path / "cache")
        assert copied.folder == fetch_champion(NAME, cache=tmp_path / "cache").folder

    def test_a_vocabulary_may_have_any_word(self, client, tmp_path: Path):
        folder = write_version(tmp_path / "version")
        (folder / "components/tokenizer/vocab.json").write_text('{"auto_map": 7}')
        register(client, folder)
        assert fetch_champion(NAME, cache=tmp_path / "cache").version == "1"

    def test_asking_for_the_version_imports_neither_torch_nor_transformers(self):
        code = (
            "import sys; from flows.serving.champion import champion_version; "
            "print([name for name in ('torch', 'transformers') if name in sys.modules])"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert ran.stdout.strip() == "[]"


class TestCache:
    def test_what_was_fetched_is_verified_again_and_needs_no_store(
        self, client, version: Path, tmp_path: Path
    ):
        _, place = register(client, version)
        first = fetch_champion(NAME, cache=tmp_path / "cache")
        Path(place).rename(tmp_path / "gone")
        assert fetch_champion(NAME, cache=tmp_path / "cache") == first
        change_a_byte(first.folder / "model/model.safetensors")
        with pytest.raises(ModelError, match=f"hold no {MANIFEST}"):
            fetch_champion(NAME, cache=tmp_path / "cache")

    def test_a_damaged_copy_is_fetched_again(self, client, version, tmp_path, caplog):
        register(client, version)
        first = fetch_champion(NAME, cache=tmp_path / "cache")
        change_a_byte(first.folder / "model/model.safetensors")
        (first.folder / "MLmodel").unlink()
        assert fetch_champion(NAME, cache=tmp_path / "cache") == first
        check_folder(first.folder, first.manifest)
        assert "Downloading a version again" in caplog.text
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.manifest]

    def test_a_file_that_somebody_laid_into_the_copy_is_refused(
        self, client, version: Path, tmp_path: Path
    ):
        register(client, version)
        folder = fetch_champion(NAME, cache=tmp_path / "cache").folder
        (folder / "model/extra.json").write_text("{}")
        said = rf"Delete the folder.*'model/extra.json' is not in its {MANIFEST}"
        with pytest.raises(ModelError, match=said):
            load_champion(NAME, cache=tmp_path / "cache")

    def test_nothing_is_left_of_a_refused_version_nor_of_an_old_fetch(
        self, client, version: Path, tmp_path: Path
    ):
        _, place = register(client, version)
        change_a_byte(Path(place) / "model/model.safetensors")
        old, young = tmp_path / "cache/.fetching-old", tmp_path / "cache/.fetching-young"
        for folder in (old, young):
            (folder / "model").mkdir(parents=True)
        os.utime(old, (0, 0))
        with pytest.raises(ModelError, match="was changed"):
            fetch_champion(NAME, cache=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == [young]

    @pytest.mark.slow
    def test_processes_that_fetch_at_once_all_get_it_whole(
        self, client, version: Path, tmp_path: Path
    ):
        number, _ = register(client, version)
        code = (
            "import sys; from flows.serving.champion import fetch_champion\n"
            "print('ready', flush=True); sys.stdin.readline()\n"  # all begin together
            f"print(fetch_champion({NAME!r}, cache={str(tmp_path / 'cache')!r}).version)"
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        assert [racer.communicate("\n")[0].strip() for racer in racers] == [number] * 2
        (folder,) = (tmp_path / "cache").iterdir()
        check_folder(folder, folder.name)

    def test_a_cache_that_cannot_be_written_is_named(self, client, version, tmp_path):
        register(client, version)
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelError, match=r"cannot be stored in .*another folder"):
            fetch_champion(NAME, cache=tmp_path / "file" / "cache")


# --- What is refused ---------------------------------------------------------------


def change_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def put(path: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)

    return write


def edit(path: str, **changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        document = json.loads((folder / path).read_text())
        (folder / path).write_text(json.dumps(document | changes))

    return write


class Boom:
    """Unpickling it would leave a file, and so show that it was."""

    def __reduce__(self):
        return os.mkdir, ("was-unpickled",)


AFTER_REGISTRATION = {
    "a byte of the weights": (
        lambda folder: change_a_byte(folder / "model/model.safetensors"),
        r"'model/model.safetensors' was changed: its digest is [0-9a-f]{64}, but",
    ),
    "a setting": (
        edit("model/generation_config.json", max_length=9),
        r"'model/generation_config.json' was changed",
    ),
    "a missing file": (
        lambda folder: (folder / "model/model.safetensors").unlink(),
        r"'model/model.safetensors' is in its manifest.json but missing",
    ),
    "one more file": (
        put("model/chat_template.jinja", b"{{ x }}"),
        r"'model/chat_template.jinja' is not in its manifest.json",
    ),
    "a card of a part": (put("model/README.md", b"x"), r"'model/README.md' is not in its manifest"),
    "a pickle": (
        put("model/pytorch_model.bin", pickle.dumps(Boom())),
        r"'model/pytorch_model.bin' is a pickle, which can run code",
    ),
    "code": (put("model/modeling.py", b"x = 1"), r"'model/modeling.py' is code"),
    "another manifest": (
        lambda folder: force_manifest(folder, extra="0" * 64),
        r"its manifest.json has the digest [0-9a-f]{64}, but the version was registered with",
    ),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        r"its artifacts hold no manifest.json",
    ),
    "a backslash": (put(r"..\..\evil.json", b"{}"), r"the path '\.\..*evil.json' could lead out"),
    "a link to a file": (
        lambda folder: (folder / "extra.json").symlink_to("/etc/passwd"),
        r"'extra.json' is a link",
    ),
    "a link to a folder": (
        lambda folder: (folder / "model/etc").symlink_to("/etc"),
        r"'model/etc' is a link",
    ),
    "weights behind a link": (
        lambda folder: link_away(folder / "model/model.safetensors"),
        r"'model/model.safetensors' is a link",
    ),
    "a pipe": (
        lambda folder: os.mkfifo(folder / "model/pipe"),
        r"'model/pipe' is a link, a pipe or a device",
    ),
}  # fmt: skip


def link_away(file: Path) -> None:
    """The same bytes, but no longer in the folder."""
    file.rename(file.parents[3] / "elsewhere")
    file.symlink_to(file.parents[3] / "elsewhere")


REGISTERED_LIKE_THAT = {
    "a pickle": (
        put("model/pytorch_model.bin", pickle.dumps(Boom())),
        r"'model/pytorch_model.bin' is a pickle",
    ),
    "an upper-case pickle": (put("model/a.PT", b"x"), r"'model/a.PT' is a pickle"),
    "a pickle by another name": (
        put("model/notes.txt", pickle.dumps(Boom())),
        r"'model/notes.txt' begins like a pickle",
    ),
    "a zip by another name": (
        put("model/notes.txt", b"PK\x03\x04..."),
        r"'model/notes.txt' begins like a pickle",
    ),
    "a pickle as weights": (
        put("model/model.safetensors", pickle.dumps(Boom())),
        r"'model/model.safetensors' is not a safetensors file",
    ),
    "code": (put("model/modeling_x.py", b"x = 1"), r"'model/modeling_x.py' is code"),
    "auto_map": (
        edit("model/config.json", auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
        r"'model/config.json' has the key 'auto_map', which would run code",
    ),
    "auto_map of the tokenizer": (
        edit("components/tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": ["x.X"]}),
        r"'components/tokenizer/tokenizer_config.json' has the key 'auto_map'",
    ),
    "custom_pipelines": (
        edit("model/config.json", custom_pipelines={"text-generation": {"impl": "x.X"}}),
        r"has the key 'custom_pipelines'",
    ),
    "trust_remote_code, deep inside": (
        edit("model/config.json", text_config=[{"x": {"trust_remote_code": True}}]),
        r"has the key 'trust_remote_code'",
    ),
    "JSON that is none": (
        put("model/config.json", b"{"),
        r"'model/config.json' cannot be read as JSON",
    ),
    "JSON without an end": (
        put("model/config.json", b"[" * 100_000),
        r"'model/config.json' cannot be read as JSON",
    ),
}


class TestRefusals:
    """Each names the file and the reason, and nothing is loaded."""

    @pytest.mark.parametrize("harm", AFTER_REGISTRATION)
    def test_a_version_that_was_changed(self, harm, client, version, tmp_path):
        do, reason = AFTER_REGISTRATION[harm]
        _, place = register(client, version)
        do(Path(place))
        self.refuses(reason, tmp_path)

    def test_a_link_to_nowhere(self, client, version, tmp_path):
        _, place = register(client, version)
        (Path(place) / "gone").symlink_to("nowhere")
        with pytest.raises(ModelError, match=r"artifacts of Version 1 .* cannot be read: .*gone"):
            load_champion(NAME, cache=tmp_path / "cache")

    @pytest.mark.parametrize("harm", REGISTERED_LIKE_THAT)
    def test_a_version_that_was_harmful_from_the_start(self, harm, client, version, tmp_path):
        do, reason = REGISTERED_LIKE_THAT[harm]
        do(version)
        register(client, version, tags={"manifest": force_manifest(version)})
        self.refuses(reason, tmp_path)

    @pytest.mark.parametrize("harm", REGISTERED_LIKE_THAT)
    def test_no_manifest_is_written_for_what_would_be_refused(self, harm, version: Path):
        do, reason = REGISTERED_LIKE_THAT[harm]
        do(version)
        with pytest.raises(ModelError, match=rf"{reason}.*\. No version was registered") as refused:
            write_manifest(version)
        assert "alias" not in str(refused.value)
        with pytest.raises(ModelError, match=reason):
            check_folder(version, force_manifest(version))

    @pytest.mark.parametrize(
        "path",
        ["../evil.json", "/etc/evil.json", r"model\evil.json", "C:evil", "a//b", "./a", ""],
    )
    def test_a_manifest_that_names_a_path_outside(self, path, client, version, tmp_path):
        digest = force_manifest(version, **{path: "0" * 64})
        register(client, version, tags={"manifest": digest})
        self.refuses(r"the path '.*' could lead out of its folder", tmp_path)

    @pytest.mark.parametrize(
        "content", [b"[]", b"{}", b'{"files": []}', b'{"files": {"a": "b"}}', b"nonsense"]
    )
    def test_a_manifest_that_is_none(self, content, client, version, tmp_path):
        (version / "manifest.json").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        register(client, version, tags={"manifest": digest})
        self.refuses(r"manifest.json'? (is not a list of files|cannot be read as JSON)", tmp_path)

    def test_a_version_without_a_manifest(self, client, version, tmp_path):
        register(client, version, tags={})
        self.refuses("no tag 'manifest', .* the flow did not register it", tmp_path)

    def test_a_tag_that_is_no_digest_never_becomes_a_path(self, client, version, tmp_path):
        (tmp_path / "outside").mkdir()
        register(client, version, tags={"manifest": "../outside"})
        self.refuses(r"its tag 'manifest' is not a SHA-256: '\.\./outside'", tmp_path)

    @pytest.mark.parametrize("missing", ["model/config.json", "components/tokenizer"])
    def test_a_version_without_a_model_or_a_tokenizer(self, missing, client, version, tmp_path):
        (version / missing).rename(tmp_path / "elsewhere")
        register(client, version)
        with pytest.raises(ModelError, match=r"it has no model/config.json or no components/tok"):
            load_champion(NAME, cache=tmp_path / "cache")

    def test_configurations_are_refused_before_the_weights_are_fetched(
        self, client, version, tmp_path
    ):
        edit("model/config.json", auto_map={"AutoModel": "x.X"})(version)
        _, place = register(client, version, tags={"manifest": force_manifest(version)})
        change_a_byte(Path(place) / "model/model.safetensors")  # would be refused if it were read
        self.refuses("auto_map", tmp_path)

    def test_weights_that_transformers_cannot_load(self, client, version, tmp_path):
        edit("model/config.json", hidden_size=64)(version)
        register(client, version)
        with pytest.raises(
            ModelError, match=f"Version 1 of '{NAME}' is unchanged since it was registered"
        ):
            load_champion(NAME, cache=tmp_path / "cache")

    @pytest.mark.parametrize("call", ["from_pretrained", "to"])
    def test_full_memory_is_no_fault_of_the_version(
        self, call, client, version, tmp_path, monkeypatch
    ):
        def fail(*given: Any, **options: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

        register(client, version)
        monkeypatch.setattr(PreTrainedModel, call, fail)
        with pytest.raises(ModelError, match=r"out of memory.* precision='bf16'\.$") as refused:
            load_champion(NAME, cache=tmp_path / "cache")
        assert "alias" not in str(refused.value)

    def refuses(self, reason: str, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=reason) as refused:
            load_champion(NAME, cache=tmp_path / "cache")
        assert str(refused.value).startswith(f"Version 1 of '{NAME}' is refused: ")
        assert "No file was loaded. Point the alias at another" in str(refused.value)
        assert list((tmp_path / "cache").glob("*")) == []
        assert not Path("was-unpickled").exists()


class TestNotFound:
    def test_no_such_model(self, client):
        with pytest.raises(ModelError, match=r"does not have 'nobody'.*Check the name, or set"):
            champion_version("nobody")

    def test_no_such_alias(self, client):
        client.create_registered_model(NAME)
        with pytest.raises(ModelError, match=r"no version with the alias 'champion'.*promote a"):
            champion_version(NAME)

    @pytest.mark.parametrize("number", ["7", "x"])
    def test_no_such_version(self, number, client):
        client.create_registered_model(NAME)
        with pytest.raises(ModelError, match=f"does not have version {number} of '{NAME}'"):
            fetch_champion(NAME, version=number)

    def test_no_registry_answers_and_its_password_is_not_printed(self):
        with (
            tracking_to("http://me:secret@127.0.0.1:9", retries=1),
            pytest.raises(ModelError, match=r"at http://127.0.0.1:9 gives no answer") as failed,
        ):
            champion_version(NAME)
        assert "secret" not in str(failed.value)


# --- A server, and artifacts in S3 -------------------------------------------------


class TestServerAndS3:
    def test_a_champion_comes_from_s3(self, served, version: Path, tmp_path: Path):
        number, place = register(served, version)
        assert place.startswith("s3://")
        loaded = load_champion(NAME, cache=tmp_path / "cache")
        assert loaded.version == number
        assert answer(loaded.model, loaded.tokenizer) == answer(make_policy(), make_tokenizer())

    @pytest.mark.parametrize(
        "key",
        ["../evil.json", "model/../evil.json", "model/../../../evil.json", "/evil.json",
         "model//evil.json", r"model\..\evil.json", "./evil.json"],
    )  # fmt: skip
    def test_a_key_that_leads_out_of_the_folder_is_refused(
        self, key, served, version: Path, tmp_path: Path
    ):
        _, place = register(served, version)
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        endpoint = os.environ["MLFLOW_S3_ENDPOINT_URL"]
        boto3.client("s3", endpoint_url=endpoint).put_object(
            Bucket=bucket, Key=f"{prefix}/{key}", Body=b"{}"
        )
        with pytest.raises(ModelError, match=r"could lead out of its folder|in the folder"):
            load_champion(NAME, cache=tmp_path / "a" / "cache")
        assert [path.name for path in tmp_path.rglob("evil*")] == []

    def test_changed_weights_in_s3_are_refused(self, served, version: Path, tmp_path: Path):
        _, place = register(served, version)
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        client = boto3.client("s3", endpoint_url=os.environ["MLFLOW_S3_ENDPOINT_URL"])
        change_a_byte(version / "model/model.safetensors")
        client.upload_file(
            str(version / "model/model.safetensors"), bucket, f"{prefix}/model/model.safetensors"
        )
        with pytest.raises(ModelError, match=r"'model/model.safetensors' was changed"):
            load_champion(NAME, cache=tmp_path / "cache")

    def test_no_such_model_or_alias(self, served):
        with pytest.raises(ModelError, match="does not have 'nobody'"):
            champion_version("nobody")
        served.create_registered_model(NAME)
        with pytest.raises(ModelError, match="no version with the alias 'champion'"):
            champion_version(NAME)

    @pytest.mark.slow
    def test_a_store_that_does_not_answer_is_named(self, served, version, tmp_path, monkeypatch):
        number, _ = register(served, version)
        monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(ModelError, match=rf"artifacts of Version {number}.*cannot be read"):
            load_champion(NAME, cache=tmp_path / "cache")
