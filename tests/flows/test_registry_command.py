"""`python flows/registry.py`: who is champion, why, and another one by hand."""

import getpass
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import pytest

import registry
from pipeline.registry import change_champion
from pipeline.registry.change_champion import record_decision
from pipeline.registry.sync_aliases import sync_aliases
from pipeline.tracking.mlflow_client import connect
from serving.manifest import MANIFEST_TAG
from tests.helpers.paths import ROOT
from tests.helpers.servers.mlflow_store import tracking_to, write_database


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> str:
    return write_database(tmp_path_factory.mktemp("mlflow") / "mlflow.db")


@pytest.fixture
def model(database: str, monkeypatch) -> Iterator[str]:
    """Version 2 is champion before version 1, and version 3 was refused."""
    monkeypatch.setattr("pipeline.registry.sync_aliases.TIMEOUT", 0.1)
    with tracking_to(database):
        yield make_model()


def make_model() -> str:
    client, name = connect(), f"policy-{uuid4().hex[:8]}"
    client.create_registered_model(name)
    run = client.create_run("0").info.run_id
    client.log_metric(run, "win_rate/ppo_vs_sft/rate", 0.617)
    client.log_metric(run, "win_rate/ppo_vs_sft/low", 0.55)
    for version in (1, 2, 3):
        tags = {MANIFEST_TAG: "0" * 64}
        client.create_model_version(name, "s3://bucket/policy", run_id=run, tags=tags)
        change_champion.challenge(name, version)
        record_decision(
            name,
            version=version,
            promote=version < 3,
            reasons=[f"Reason {version} of [bold]two[/bold].", "And another."],
            by=f"run RLHF/{version}",
            key=f"RLHF/{version}",
            after=sync_aliases(name),
        )
    return name


def ask(*arguments: str) -> int:
    return registry.main(arguments)


def champion(name: str) -> int:
    return change_champion.read_aliases(name)["champion"]


def test_show_tells_who_is_champion_since_when_and_with_which_win_rates(model: str, capsys):
    assert ask("show", model) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if "version" in line] == [
        "champion: version 2, promoted",
        "previous-champion: version 1, promoted",
        "challenger: version 3, refused",
    ]
    assert told.count("PPO against SFT: 61.7%") == 3
    assert "55.0%" not in told
    assert "by run RLHF/2\n    Reason 2 of [bold]two[/bold].\n    And another.\n" in told
    assert told.endswith("Aliases and history agree.\n")


def test_show_tells_of_an_alias_that_was_moved_and_changes_nothing(model: str, capsys):
    connect().set_registered_model_alias(model, "champion", "3")
    assert ask("show", model) == 0
    assert (
        "The alias champion is version 3, but the history says version 2."
        in capsys.readouterr().out
    )
    assert len(change_champion.read_champions(model).decisions) == 3
    assert champion(model) == 3


def test_history_tells_every_decision_with_its_reasons_as_they_are(model: str, capsys):
    assert ask("history", model) == 0
    told = capsys.readouterr().out
    for words in ("promoted", "refused", "version 2", "run RLHF/3", "And another."):
        assert words in told
    assert (
        told.index("Reason 1 of [bold]two[/bold].") < told.index("Reason 2") < told.index("son 3")
    )


def test_nobody_can_write_commands_for_the_terminal_into_the_history(model: str, capsys):
    connect().set_model_version_tag(model, "2", "promotion_reasons", "\x1b[2J gone")
    assert ask("show", model) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_rollback_brings_back_the_one_before_and_says_who_and_why(model: str, capsys):
    assert ask("rollback", model, "--reason", "It swears.") == 0
    assert capsys.readouterr().out == (
        f"Version 2 of {model} was withdrawn; version 1 is champion again.\n"
    )
    assert champion(model) == 1
    made = change_champion.read_champions(model).decisions[-1]
    assert made.reasons == ("It swears.",)
    assert made.by == f"person {getpass.getuser()}"
    assert ask("rollback", model) == 1
    assert "registry: Version 1 of" in capsys.readouterr().err


def test_a_promotion_by_hand_needs_a_reason(model: str, capsys):
    with pytest.raises(SystemExit):
        ask("promote", model, "3")
    assert "--reason" in capsys.readouterr().err
    assert ask("promote", model, "3", "--reason", "The judge was wrong.") == 0
    assert capsys.readouterr().out == f"Version 3 of {model} is champion.\n"
    assert champion(model) == 3


def test_the_person_is_whom_metaflow_was_told(model: str, monkeypatch):
    monkeypatch.setenv("METAFLOW_USER", "ada")
    assert ask("promote", model, "1", "--reason", "Why not.") == 0
    assert change_champion.read_champions(model).decisions[-1].by == "person ada"


@pytest.mark.parametrize(
    "asked", [("show",), ("history",), ("rollback",), ("promote", "1", "--reason", "No.")]
)
def test_a_model_that_nobody_registered_is_an_error(model: str, capsys, asked: tuple[str, ...]):
    command, *more = asked
    assert ask(command, "nothing", *more) == 1
    assert capsys.readouterr().err.startswith("registry: ")


@pytest.mark.slow
def test_the_file_runs_by_itself_and_names_a_server_that_does_not_answer(model: str):
    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "flows" / "registry.py"), "history", model],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
                **environment,
            },
            capture_output=True,
            text=True,
        )

    assert "run RLHF/3" in run().stdout
    away = run(MLFLOW_TRACKING_URI="http://127.0.0.1:1")
    assert away.returncode == 1
    assert away.stderr.startswith("registry: The MLflow registry at http://127.0.0.1:1 gives no")


class Refusing(BaseHTTPRequestHandler):
    """A server that lists its models, and refuses all else."""

    def answer(self):
        known = self.path.partition("?")[0].endswith("registered-models/search")
        words = {} if known else {"error_code": "PERMISSION_DENIED", "message": "Not for you."}
        body = json.dumps(words).encode()
        self.send_response(200 if known else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, *words):
        pass


@pytest.mark.parametrize(
    "asked", [("show",), ("history",), ("rollback",), ("promote", "1", "--reason", "No.")]
)
def test_what_mlflow_refuses_is_a_sentence_without_the_password(capsys, asked: tuple[str, ...]):
    command, *more = asked
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        with tracking_to(f"http://me:secret@{address}"):
            assert ask(command, "policy", *more) == 1
        server.shutdown()
    told = capsys.readouterr().err
    assert told.startswith(f"registry: MLflow at http://{address} did not carry out a request:")
    assert "Not for you." in told
    assert "secret" not in told


def test_a_database_without_its_driver_is_a_sentence_without_the_password(capsys):
    with tracking_to("mysql+pymysql://me:secret@127.0.0.1:1/db"):
        assert ask("show", "policy") == 1
    told = capsys.readouterr().err
    assert told.startswith("registry: The MLflow registry at mysql+pymysql://127.0.0.1:1/db gives")
    assert "secret" not in told
