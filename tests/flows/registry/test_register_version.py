"""One version of each run of the flow, whatever happens while it is registered."""

import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import mlflow
import pytest
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM

from pipeline.registry.artifact import VersionContents, write_artifact
from pipeline.registry.fetch_policy import find_policy
from pipeline.registry.register_version import (
    CUT_DESCRIPTION,
    DESCRIPTION,
    MAX_DESCRIPTION_CHARACTERS,
    _within_limit,
    register_version,
    write_card,
)
from pipeline.settings.decoding import Decoding
from ppo_core.errors import ModelError, TrainingError
from tests.helpers.models.tiny import make_policy, make_tokenizer
from tests.helpers.servers.fault_proxy import Fault, fault_proxy, start_process
from tests.helpers.servers.full_disk import full_disk
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import BUCKET, MlflowServer, mlflow_server, s3

CARD = "---\ntags:\n- ppo\n---\n\n# The card"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[MlflowServer]:
    """MLflow with its artifacts in S3, to which the clients write themselves."""
    with s3() as environment, pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        folder = tmp_path_factory.mktemp("mlflow")
        with mlflow_server(folder, f"s3://{BUCKET}/models", environment) as running:
            yield running


@pytest.fixture
def client(server: MlflowServer) -> Iterator[MlflowClient]:
    with tracking_to(server.url):
        yield MlflowClient()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A registered model of the test's own."""
    return str(request.node.name)[:200]


def start_run(client: MlflowClient) -> str:
    experiment = client.get_experiment_by_name("rlhf")
    number = experiment.experiment_id if experiment else client.create_experiment("rlhf")
    return client.create_run(number).info.run_id


def register(
    policy: Path, name: str, run_id: str, flow_run: str = "17", **tags: str
) -> dict[str, str]:
    write = partial(_write, policy, name, run_id)
    return register_version(
        name, run_id=run_id, flow_run=flow_run, write=write, tags=tags, description=CARD
    )


def _write(policy: Path, name: str, run_id: str, folder: Path, model_id: str) -> str:
    contents = VersionContents(
        name=name,
        decoding=Decoding(response_length=5, temperature=0),
        example="w1",
        card=CARD,
    )
    return write_artifact(policy, folder, contents, run_id=run_id, model_id=model_id)


def require_one_version(client: MlflowClient, name: str, run_id: str) -> str:
    """One version of one uploaded model, whole, and shown with the run; returns its number."""
    (version,) = client.search_model_versions(f"run_id = '{run_id}'")
    assert version.name == name
    run = client.get_run(run_id)
    (model,) = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'")
    assert model.status == "READY"
    assert version.source == f"models:/{model.model_id}"
    assert {output.model_id for output in run.outputs.model_outputs} == {model.model_id}
    manifest = Path(
        mlflow.artifacts.download_artifacts(f"models:/{name}/{version.version}/manifest.json")
    )
    assert hashlib.sha256(manifest.read_bytes()).hexdigest() == version.tags["manifest"]
    return str(version.version)


def test_a_version_has_its_lineage_its_card_and_its_place(
    client: MlflowClient, name: str, policy: Path
):
    run_id = start_run(client)
    made = register(policy, name, run_id, commit="c0ffee")
    number = require_one_version(client, name, run_id)
    version = client.get_model_version(name, number)
    assert made == {
        "name": name,
        "version": "1",
        "uri": f"models:/{name}/1",
        "run_id": run_id,
        "manifest": version.tags["manifest"],
    }
    assert version.tags == {"commit": "c0ffee", "flow_run": "17", "manifest": made["manifest"]}
    assert version.description == CARD
    assert mlflow.pyfunc.load_model(made["uri"]).predict(["w1 w2"])


def test_the_default_of_no_server_does_as_well(
    mlflow_client: MlflowClient, policy: Path, tmp_path: Path
):
    run_id = start_run(mlflow_client)
    first = register(policy, "rlhf-policy", run_id)
    assert register(policy, "rlhf-policy", run_id) == first
    require_one_version(mlflow_client, "rlhf-policy", run_id)
    model, _ = find_policy(first["uri"], tmp_path)
    assert_same_weights(model)


def test_a_step_that_is_tried_again_finds_its_version(
    client: MlflowClient, name: str, policy: Path
):
    run_id = start_run(client)
    first = register(policy, name, run_id)
    assert register(policy, name, run_id) == first
    require_one_version(client, name, run_id)


def test_runs_have_their_own_versions_and_a_resumed_one_too(
    client: MlflowClient, name: str, policy: Path
):
    run_id, other = start_run(client), start_run(client)
    assert register(policy, name, run_id)["version"] == "1"
    assert register(policy, name, other, "18")["version"] == "2"
    assert register(policy, name, run_id, "19")["version"] == "3"
    assert register(policy, name, run_id)["version"] == "1"
    assert len(client.search_model_versions(f"name = '{name}'")) == 3


def test_a_version_that_a_person_made_of_the_run_is_left_alone(
    client: MlflowClient, name: str, policy: Path
):
    run_id = start_run(client)
    register(policy, name, run_id)
    source = client.get_model_version(name, "1").source
    model_id = source.removeprefix("models:/")
    client.create_model_version(name, source, run_id, model_id=model_id)
    assert register(policy, name, run_id)["version"] == "1"
    assert len(client.search_model_versions(f"name = '{name}'")) == 2


def test_a_version_that_was_deleted_is_not_made_again(
    client: MlflowClient, name: str, policy: Path
):
    run_id = start_run(client)
    register(policy, name, run_id)
    client.delete_model_version(name, "1")
    with pytest.raises(ModelError, match=rf"Version 1 of '{name}'.*Start a new run"):
        register(policy, name, run_id)


def test_a_registry_that_refuses_is_an_error_with_its_words(
    client: MlflowClient, name: str, policy: Path
):
    refused = f"{name}/with a slash"
    message = r"did not carry out a request.*Invalid model name.*resume"
    with pytest.raises(ModelError, match=message):
        register(policy, refused, start_run(client))


def test_a_store_of_artifacts_that_is_away_is_an_error_and_leaves_no_version(
    client: MlflowClient, name: str, policy: Path, monkeypatch: pytest.MonkeyPatch
):
    run_id = start_run(client)
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(ModelError, match=r"artifact store did not accept.*rlhf.py resume"):
            register(policy, name, run_id)
    assert client.search_model_versions(f"run_id = '{run_id}'") == []
    register(policy, name, run_id)
    require_one_version(client, name, run_id)


def test_a_full_disk_is_not_an_error_of_mlflow(mlflow_client: MlflowClient, policy: Path):
    run_id = start_run(mlflow_client)

    def write(folder: Path, model_id: str) -> str:
        with full_disk(1000):
            return _write(policy, "full", run_id, folder, model_id)

    with pytest.raises(TrainingError, match=r"cannot be written: .*Free disk space"):
        register_version(
            "full", run_id=run_id, flow_run="17", write=write, tags={}, description=CARD
        )


def test_a_card_is_written_again(client: MlflowClient, name: str, policy: Path):
    made = register(policy, name, start_run(client))
    write_card(name, 1, "# Promoted", "Version 1 was promoted.")
    assert client.get_model_version(name, "1").description == "Version 1 was promoted."
    assert mlflow.artifacts.load_text(f"{made['uri']}/README.md") == "# Promoted"


def test_the_name_in_the_description_of_a_registered_model_is_no_markup(
    mlflow_client: MlflowClient, policy: Path
):
    name = r"<img src=x> ![y](\\192.0.2.1\y) @ada www.example.org"
    register(policy, name, start_run(mlflow_client))
    description = mlflow_client.get_registered_model(name).description
    shown = "&#60;img src=x&#62; !\\[y\\](&#92;&#92;192.0.2.1&#92;y) &#64;ada `www.example.org`."
    assert description == DESCRIPTION + shown


def test_a_long_description_is_visibly_cut(client: MlflowClient, name: str, policy: Path):
    register(policy, name, start_run(client))
    write_card(name, "1", CARD, "a long line\n" * 2000)
    description = client.get_model_version(name, "1").description
    kept = description.removesuffix(CUT_DESCRIPTION)
    assert MAX_DESCRIPTION_CHARACTERS - len("a long line\n") <= len(description)
    assert len(description) <= MAX_DESCRIPTION_CHARACTERS
    assert set(kept.split("\n")) == {"a long line"} and kept != description


def test_a_description_is_never_cut_within_an_escape_or_a_block_of_code():
    lines = ["&#60;b&#62; `http://x`", "```python", "load('<b>')", "```", "end"]
    room = MAX_DESCRIPTION_CHARACTERS - len(CUT_DESCRIPTION)
    for visible in range(len("\n".join(lines)) + 2):
        description = _within_limit("\n".join(["x" * (room - visible), *lines, "z" * 200]))
        kept = description.removesuffix(CUT_DESCRIPTION).split("\n")[1:]
        fit = sum(len("\n".join(lines[: n + 1])) < visible for n in range(len(lines)))
        assert kept == lines[: 1 if fit in (2, 3) else fit]


def test_a_card_needs_a_version_that_has_one(client: MlflowClient, name: str):
    client.create_registered_model(name)
    with pytest.raises(ModelError, match="not found"):
        write_card(name, 4, CARD, CARD)
    client.create_model_version(name, f"s3://{BUCKET}/elsewhere")
    with pytest.raises(ModelError, match="no model card to replace"):
        write_card(name, 1, CARD, CARD)


def test_a_version_of_the_flow_is_found_and_one_without_a_manifest_is_refused(
    client: MlflowClient, name: str, policy: Path, tmp_path: Path
):
    ours = register(policy, name, start_run(client))["uri"]
    mlflow.set_experiment("rlhf")
    with mlflow.start_run():
        mlflow.transformers.log_model(
            {"model": make_policy(), "tokenizer": make_tokenizer()},
            name="plain",
            task="text-generation",
            pip_requirements=["transformers"],
            registered_model_name=name,
        )
    client.set_registered_model_alias(name, "mine", "1")
    for uri in (ours, f"models:/{name}@mine"):
        model, tokenizer = find_policy(uri, tmp_path)
        assert_same_weights(model)
        assert (Path(tokenizer) / "tokenizer.json").exists()
    with pytest.raises(ModelError, match="the flow did not register it"):
        find_policy(f"models:/{name}/2", tmp_path)


def assert_same_weights(folder: Path | str) -> None:
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    expected = make_policy().state_dict()
    assert all(found[name].equal(expected[name]) for name in expected)


# --- On a server that fails --------------------------------------------------------


def test_a_registry_that_commits_and_loses_its_replies_has_one_version(
    server: MlflowServer, client: MlflowClient, name: str, policy: Path
):
    run_id = start_run(client)
    lost = Fault(changes=True, again=False, times=99, drop=True)
    with fault_proxy(server.url) as proxy, tracking_to(proxy.url):
        proxy.add(lost)
        made = register(policy, name, run_id)
    assert require_one_version(client, name, run_id) == made["version"] == "1"
    twice = {request for request in lost.hits if proxy.requests.count(request) > 1}
    assert {"POST model-versions/create", "POST logged-models"} <= twice


@pytest.mark.slow
def test_a_step_killed_behind_any_of_its_requests_and_tried_again_has_one_version(
    server: MlflowServer, client: MlflowClient, name: str, policy: Path
):
    killed_behind: list[str] = []
    while True:
        run_id = start_run(client)
        killed, exit_code = register_until_killed(server, policy, name, run_id, len(killed_behind))
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
        killed_behind.append(killed)
        made = register(policy, name, run_id)
        assert require_one_version(client, name, run_id) == made["version"]
    assert {
        *("POST logged-models", "POST model-versions/create", "POST runs/log-parameter"),
        "POST runs/outputs",
    } <= set(killed_behind)


def register_until_killed(
    server: MlflowServer, policy: Path, name: str, run_id: str, survives: int
) -> tuple[str, int | None]:
    """Kill a step once the server did what it asked for after `survives` other changes.

    Returns what it had asked for last, if it asked for so much, and its exit status.
    """
    victim: SimpleQueue[int] = SimpleQueue()
    kill = Fault(
        changes=True, skip=survives, after=lambda: os.kill(victim.get(), signal.SIGKILL), drop=True
    )
    with fault_proxy(server.url) as proxy:
        proxy.add(kill)
        process = start_process(partial(register, policy, name, run_id), proxy.url)
        victim.put(process.pid)
        process.join()
    return "".join(kill.hits), process.exitcode


def test_a_policy_that_was_uploaded_whole_is_not_uploaded_again(
    server: MlflowServer,
    client: MlflowClient,
    name: str,
    policy: Path,
):
    run_id = start_run(client)
    with (
        fault_proxy(server.url) as proxy,
        tracking_to(proxy.url, retries=0),
        pytest.raises(ModelError, match="model-versions/create"),
    ):
        proxy.add(Fault("POST model-versions/create", lose=True, times=99))
        register(policy, name, run_id)

    def write_again(folder: Path, model_id: str) -> str:
        raise AssertionError("it is there already")

    register_version(
        name, run_id=run_id, flow_run="17", write=write_again, tags={}, description=CARD
    )
    require_one_version(client, name, run_id)


def test_copies_of_a_step_that_run_at_once_agree_on_one_version(
    server: MlflowServer, client: MlflowClient, name: str, policy: Path
):
    run_id = start_run(client)
    copies = 2
    all_create = threading.Barrier(copies)
    create = "POST model-versions/create"
    with fault_proxy(server.url) as proxy:
        proxy.add(Fault(create, before=lambda: all_create.wait(100) and None, times=copies))
        work = partial(register, policy, name, run_id)
        processes = [start_process(work, proxy.url) for _ in range(copies)]
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0] * copies
    assert proxy.requests.count(create) == copies
    assert require_one_version(client, name, run_id) == "1"


def test_a_copy_that_was_overtaken_while_it_wrote_takes_the_version_of_the_other(
    client: MlflowClient, name: str, policy: Path
):
    run_id = start_run(client)
    faster: list[dict[str, str]] = []

    def write_slowly(folder: Path, model_id: str) -> str:
        faster.append(register(policy, name, run_id))
        return _write(policy, name, run_id, folder, model_id)

    slower = register_version(
        name, run_id=run_id, flow_run="17", write=write_slowly, tags={}, description=CARD
    )
    assert faster == [slower]
    require_one_version(client, name, run_id)


def test_runs_that_register_a_new_name_at_once_have_a_version_each(
    server: MlflowServer, client: MlflowClient, name: str, policy: Path
):
    runs = [start_run(client) for _ in range(3)]
    processes = [
        start_process(partial(register, policy, name, run_id, run_id), server.url)
        for run_id in runs
    ]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert {require_one_version(client, name, run_id) for run_id in runs} == {"1", "2", "3"}


@pytest.mark.slow
def test_a_server_that_is_not_there_is_an_error_that_says_so(policy: Path):
    with (
        tracking_to("http://127.0.0.1:9", retries=0),
        pytest.raises(ModelError, match=r"127\.0\.0\.1:9 did not carry out a request"),
    ):
        register(policy, "rlhf-policy", "0" * 32)
