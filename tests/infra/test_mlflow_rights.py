"""The rights of MLflow's three users, on a real server with infra/mlflow's own commands."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.server.auth.client import AuthServiceClient

from pipeline.inputs.lineage import FLOW_RUN
from pipeline.tracking.mlflow_runs import STEP, find_runs
from serving.answer_traces import served_experiment
from tests.helpers.paths import ROOT
from tests.helpers.servers.servers import free_port, wait_until_answering

# Each request waits for a hash of the password, and there are many.
pytestmark = pytest.mark.slow

FOLDER = ROOT / "infra" / "mlflow"
MODEL = "rlhf-policy"
NO_BUCKET = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
PASSWORDS = {name: f"password-of-{name}" for name in ("admin", "train", "register", "consumer")}


@dataclass
class Registry:
    """A server with a version, which the user `register` has made."""

    url: str
    experiment: str = ""
    run: str = ""
    model: str = ""
    version: str = ""
    history: str = ""

    def as_user(self, user: str, password: str = "") -> Any:
        """Return a context in which MLflow's clients are this user."""
        return patch.dict(
            os.environ,
            MLFLOW_TRACKING_URI=self.url,
            MLFLOW_TRACKING_USERNAME=user,
            MLFLOW_TRACKING_PASSWORD=password or PASSWORDS.get(user, "wrong"),
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="1",
        )

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.url)


def grant(registry: Registry, passwords: dict[str, str]) -> None:
    """Run the command that grants the rights."""
    words = {f"{user.upper()}_PASSWORD": password for user, password in passwords.items()}
    with registry.as_user("admin"):
        ended = subprocess.run(
            [sys.executable, FOLDER / "grant_rights.py", MODEL],
            env={**os.environ, **words},
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 0, ended.stderr


def register_a_version(registry: Registry) -> None:
    """Do what the step `register` does, with its user."""
    with registry.as_user("register"):
        client = registry.client
        found = client.get_experiment_by_name("rlhf")
        assert found is not None
        registry.experiment = found.experiment_id
        registry.run = client.create_run(registry.experiment).info.run_id
        model = client.create_logged_model(
            registry.experiment, "policy", source_run_id=registry.run
        )
        client.set_logged_model_tags(model.model_id, {"manifest": "0" * 64})
        client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        registry.model = model.model_id
        version = client.create_model_version(
            MODEL, f"models:/{model.model_id}", registry.run, model_id=model.model_id
        )
        registry.version = str(version.version)
        client.set_registered_model_alias(MODEL, "champion", registry.version)
        ledger = client.create_experiment("promotions, unfinished")
        registry.history = client.create_run(ledger).info.run_id
        client.rename_experiment(ledger, f"promotions of {MODEL}")
        client.log_param(registry.history, "0001", "promoted")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    made = Registry(f"http://127.0.0.1:{port}")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "DATABASE": f"sqlite:///{folder}/server.db",
        "ARTIFACT_ROOT": "s3://bucket/mlflow",
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "WORKERS": "1",
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORDS["admin"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "session",
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{port}",
    }
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [FOLDER / "server.sh"],
            cwd=folder,
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_answering(f"{made.url}/health", process, folder / "server.log")
            grant(made, {user: PASSWORDS[user] for user in ("train", "register", "consumer")})
            register_a_version(made)
            yield made
        finally:
            process.terminate()
            process.wait()


READS: dict[str, Callable[[Registry], object]] = {
    "alias": lambda on: on.client.get_model_version_by_alias(MODEL, "champion"),
    "address of the files": lambda on: on.client.get_model_version_download_uri(MODEL, on.version),
    "logged model": lambda on: on.client.get_logged_model(on.model),
    "runs": lambda on: on.client.search_runs([on.experiment]),
    "history": lambda on: on.client.get_run(on.history),
    "list of models": lambda on: on.client.search_registered_models(),
}

REGISTRY_WRITES: dict[str, Callable[[Registry], object]] = {
    "version": lambda on: on.client.create_model_version(
        MODEL, f"models:/{on.model}", on.run, model_id=on.model
    ),
    "alias": lambda on: on.client.set_registered_model_alias(MODEL, "champion", on.version),
    "no alias": lambda on: on.client.delete_registered_model_alias(MODEL, "champion"),
    "tag": lambda on: on.client.set_model_version_tag(MODEL, on.version, "manifest", "1"),
    "description": lambda on: on.client.update_model_version(MODEL, on.version, "better"),
    "no version": lambda on: on.client.delete_model_version(MODEL, on.version),
    "no model": lambda on: on.client.delete_registered_model(MODEL),
    "another model": lambda on: on.client.create_registered_model("other"),
    "another experiment": lambda on: on.client.create_experiment("other"),
    "tag of files": lambda on: on.client.set_logged_model_tags(on.model, {"manifest": "1"}),
    "no files": lambda on: on.client.delete_logged_model(on.model),
    "history": lambda on: on.client.log_param(on.history, "0002", "promoted"),
    "own rights": lambda on: AuthServiceClient(on.url).grant_user_permission(
        "train", "registered_model", MODEL, "MANAGE"
    ),
    "administrator": lambda on: AuthServiceClient(on.url).update_user_admin("train", True),
}


def refused(call: Callable[[Registry], object], registry: Registry) -> bool:
    """Return whether the server refuses a request because of the user."""
    try:
        call(registry)
    except MlflowException as error:
        assert error.error_code in ("PERMISSION_DENIED", "UNAUTHENTICATED"), error
        return True
    return False


@pytest.mark.parametrize("user", ["train", "register", "consumer"])
@pytest.mark.parametrize("what", READS)
def test_every_user_reads(what: str, user: str, registry: Registry):
    with registry.as_user(user):
        assert not refused(READS[what], registry)


@pytest.mark.parametrize("user", ["train", "consumer"])
@pytest.mark.parametrize("what", REGISTRY_WRITES)
def test_only_register_writes_the_registry(what: str, user: str, registry: Registry):
    with registry.as_user(user):
        assert refused(REGISTRY_WRITES[what], registry)


def test_training_logs_its_runs(registry: Registry):
    with registry.as_user("train"):
        client = registry.client
        run = client.create_run(registry.experiment, tags={"step": "train_policy"}).info.run_id
        client.log_metric(run, "ppo/kl", 0.5)
        client.log_param(run, "seed", "1")
        client.set_tag(run, "outcome", "refused")
        client.set_terminated(run)
        assert client.get_run(run).data.metrics == {"ppo/kl": 0.5}


def test_training_uses_the_older_of_two_runs_which_it_may_not_delete(registry: Registry):
    """MLflow has two runs of a step if the reply to the creation of the first run was lost."""
    tags = {FLOW_RUN: "RLHF/1", STEP: "train_policy"}
    with registry.as_user("train"):
        first, second = (
            registry.client.create_run(registry.experiment, start_time=time, tags=tags)
            for time in (1_000, 2_000)
        )
        assert refused(lambda on: on.client.delete_run(second.info.run_id), registry)
        assert find_runs("RLHF/1") == {"train_policy": first.info.run_id}
    with registry.as_user("register"):
        assert find_runs("RLHF/1") == {"train_policy": first.info.run_id}
        assert registry.client.get_run(second.info.run_id).info.lifecycle_stage == "deleted"
    with registry.as_user("nobody"), pytest.raises(MlflowException):
        find_runs("RLHF/1")


def test_training_cannot_pass_off_files_as_those_of_a_version(registry: Registry):
    """It may begin a logged model, but never complete it; so `register` never finds it."""
    with registry.as_user("train"):
        made = registry.client.create_logged_model(registry.experiment, "policy")
        with pytest.raises(MlflowException, match="Permission denied"):
            registry.client.finalize_logged_model(made.model_id, LoggedModelStatus.READY)


RECORD = """
import sys
import mlflow
from serving.answer_traces import begin_answer, record_opinion, record_to

model = sys.argv[1]
record_to(model)
span = begin_answer(model, "1", {"prompt": "2 + 2 ="})
span.end(outputs={"text": "4"})
mlflow.flush_trace_async_logging()
record_opinion(model, span.trace_id, user="someone", liked=True, correction="four")
print(span.trace_id)
"""
"""What docs/champion_service.py --record does for an answer and an opinion."""


def test_a_consumer_records_served_answers_and_opinions(registry: Registry):
    with registry.as_user("consumer"):
        ended = subprocess.run(
            [sys.executable, "-c", RECORD, MODEL],
            # The bucket of the server does not exist; MLflow keeps spans in its database.
            env={**os.environ, "PYTHONPATH": str(ROOT / "flows"), **NO_BUCKET},
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 0, ended.stderr
    with registry.as_user("train"):
        trace = registry.client.get_trace(ended.stdout.split()[-1], display=False)
        served = registry.client.get_experiment_by_name(served_experiment(MODEL))
    assert served is not None
    assert trace.info.experiment_id == served.experiment_id
    assert trace.data.spans[0].outputs == {"text": "4"}
    given = {one.name: one.value for one in trace.info.assessments}
    assert given == {"liked": True, "expected_response": "four"}
    # infra/aws/roles.yaml lets clients upload the spans, which some replies of a server demand.
    place = trace.info.tags["mlflow.artifactLocation"]
    root = f"s3://bucket/mlflow/workspaces/default/{served.experiment_id}"
    assert place == f"{root}/traces/{trace.info.trace_id}/artifacts"
    assert trace.info.trace_id.startswith("tr-")


def test_a_consumer_logs_nothing_else(registry: Registry):
    with registry.as_user("consumer"):
        assert refused(lambda on: on.client.create_run(on.experiment), registry)
        assert refused(lambda on: on.client.log_metric(on.run, "a", 1.0), registry)
        served = registry.client.get_experiment_by_name(served_experiment(MODEL))
        assert served is not None
        assert refused(lambda on: on.client.delete_experiment(served.experiment_id), registry)
        made = registry.client.create_logged_model(served.experiment_id, "policy")
        assert refused(
            lambda on: on.client.finalize_logged_model(made.model_id, LoggedModelStatus.READY),
            registry,
        )


@pytest.mark.parametrize(("user", "password"), [("nobody", "x"), ("train", "wrong")])
def test_nobody_else_reads(user: str, password: str, registry: Registry):
    with registry.as_user(user, password):
        assert refused(READS["alias"], registry)


def test_files_of_a_version_lie_apart_from_those_of_runs(registry: Registry):
    """The policy of the bucket tells both apart by their names; see infra/aws/storage.yaml."""
    with registry.as_user("consumer"):
        model = registry.client.get_logged_model(registry.model).artifact_location
        run = registry.client.get_run(registry.run).info.artifact_uri
    root = f"s3://bucket/mlflow/workspaces/default/{registry.experiment}"
    assert model == f"{root}/models/{registry.model}/artifacts"
    assert registry.model.startswith("m-")
    assert run == f"{root}/{registry.run}/artifacts"


def test_granting_again_replaces_a_password_and_keeps_the_rights(registry: Registry):
    again = {user: PASSWORDS[user] for user in ("train", "register")} | {
        "consumer": "a new password"
    }
    grant(registry, again)
    with registry.as_user("consumer"):
        assert refused(READS["alias"], registry)
    with registry.as_user("consumer", "a new password"):
        assert not refused(READS["alias"], registry)
        assert refused(REGISTRY_WRITES["alias"], registry)
    grant(registry, {**again, "consumer": PASSWORDS["consumer"]})
