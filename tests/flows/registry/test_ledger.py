"""The ledger on a real MLflow server, behind a proxy that loses replies and stops processes."""

from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
from mlflow import MlflowClient
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException

from pipeline.registry.decisions import encode
from pipeline.registry.ledger import History, find_ledger, open_ledger
from pipeline.tracking.mlflow_client import connect
from ppo_core.errors import ModelError
from tests.flows.registry.test_decisions import FIRST
from tests.helpers.servers.fault_proxy import Fault, FaultProxy, fault_proxy, fork, start_process
from tests.helpers.servers.mlflow_store import tracking_to
from tests.helpers.servers.servers import MlflowServer, shared_server


@pytest.fixture
def server() -> Iterator[MlflowServer]:
    with tracking_to(shared_server().url):
        yield shared_server()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[FaultProxy]:
    """All MLflow of this process goes through it."""
    with fault_proxy(server.url) as running, tracking_to(running.url):
        yield running


@pytest.fixture
def name() -> str:
    return f"policy {uuid4().hex[:8]}"


def test_what_was_appended_is_read_back_in_order(server: MlflowServer, name: str):
    ledger = open_ledger(connect(), name)
    assert ledger.read() == History()
    second = replace(FIRST, number=2, action="refused", version=5, key="RLHF/124")
    ledger.append(FIRST)
    assert ledger.read() == History((FIRST,), applied=0)
    assert ledger.read().pending
    ledger.mark_applied(1)
    ledger.append(second)
    ledger.mark_applied(2)
    assert find_ledger(connect(), name).read() == History((FIRST, second), applied=2)
    assert not ledger.read().pending


def test_a_number_that_is_taken_stays_with_whoever_got_it(server: MlflowServer, name: str):
    ledger = open_ledger(connect(), name)
    ledger.append(FIRST)
    ledger.append(replace(FIRST, version=5, key="another"))
    assert ledger.read().decisions == (FIRST,)


def test_of_many_processes_that_append_the_same_number_one_gets_it(server, name: str):
    ledger = open_ledger(connect(), name)
    start = fork.Barrier(5)

    def append(version: int) -> None:
        start.wait()
        for number in range(1, 5):
            ledger.append(replace(FIRST, number=number, version=version, key=f"{version}"))

    processes = [start_process(lambda v=v: append(v), server.url) for v in range(5)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [decision.number for decision in ledger.read().decisions] == [1, 2, 3, 4]


def test_processes_that_create_a_ledger_at_the_same_moment_share_one(server, name: str):
    start, made = fork.Barrier(5), fork.SimpleQueue()

    def create() -> None:
        client = connect()
        client.search_experiments(max_results=1)
        start.wait()
        made.put(open_ledger(client, name).run_id)

    processes = [start_process(create, server.url) for _ in range(5)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len({made.get() for _ in processes}) == 1
    ours = [each for each in connect().search_experiments() if name in each.name]
    assert [each.name for each in ours] == [f"promotions of {name}"]


@pytest.mark.parametrize(
    "path",
    "experiments/create runs/create runs/update set-experiment-tag experiments/update".split(),
)
def test_a_reply_lost_while_the_ledger_is_made_leaves_one_ledger(proxy, name: str, path: str):
    fault = proxy.add(Fault(path, drop=True))
    ledger = open_ledger(connect(), name)
    assert fault.happened.is_set()
    ledger.append(FIRST)
    assert open_ledger(connect(), name).read().decisions == (FIRST,)


def test_a_reply_lost_once_is_asked_again_and_leaves_one_decision(proxy, name: str):
    ledger = open_ledger(connect(), name)
    fault = proxy.add(Fault("log-parameter", drop=True))
    ledger.append(FIRST)
    assert fault.happened.is_set()
    assert sum(path.endswith("log-parameter") for path in proxy.requests) == 2
    assert ledger.read().decisions == (FIRST,)


def test_a_reply_that_is_lost_each_time_still_leaves_one_decision(proxy, name: str):
    ledger = open_ledger(connect(), name)
    proxy.add(Fault("log-parameter", drop=True, times=99))
    ledger.append(FIRST)
    assert ledger.read().decisions == (FIRST,)


def test_what_could_not_be_written_is_an_error(server: MlflowServer, name: str):
    ledger = open_ledger(connect(), name)
    connect().delete_run(ledger.run_id)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        ledger.append(FIRST)


def test_a_deleted_run_is_an_error_until_it_is_restored(server: MlflowServer, name: str):
    ledger = open_ledger(connect(), name)
    ledger.append(FIRST)
    connect().delete_run(ledger.run_id)
    with pytest.raises(ModelError, match=f"mlflow runs restore --run-id {ledger.run_id}"):
        ledger.read()
    connect().restore_run(ledger.run_id)
    assert ledger.read().decisions == (FIRST,)


def test_a_deleted_experiment_is_an_error_until_it_is_restored(server: MlflowServer, name: str):
    client = connect()
    ledger = open_ledger(client, name)
    ledger.append(FIRST)
    experiment = client.get_experiment_by_name(f"promotions of {name}").experiment_id
    client.delete_experiment(experiment)
    for find in (find_ledger, open_ledger):
        with pytest.raises(ModelError, match=f"restore --experiment-id {experiment}`"):
            find(client, name)
    client.restore_experiment(experiment)
    assert open_ledger(client, name).read().decisions == (FIRST,)


def test_an_experiment_of_somebody_else_is_left_alone(server: MlflowServer, name: str):
    connect().create_experiment(f"promotions of {name}")
    with pytest.raises(ModelError, match="is not the history of the promotions"):
        open_ledger(connect(), name)


@pytest.mark.parametrize("line", ["by hand", "{}", "[]", encode(replace(FIRST, action="crowned"))])
def test_what_another_release_or_a_person_wrote_is_an_error(server, name: str, line: str):
    ledger = open_ledger(connect(), name)
    connect().log_param(ledger.run_id, "0001", line)
    with pytest.raises(ModelError, match="Decision 1 of the history cannot be read"):
        ledger.read()


def test_a_parameter_that_is_no_decision_is_ignored(server: MlflowServer, name: str):
    ledger = open_ledger(connect(), name)
    connect().log_param(ledger.run_id, "note", "12")
    assert ledger.read() == History()


def test_long_reasons_are_cut_visibly_and_survive_the_server(server: MlflowServer, name: str):
    ledger = open_ledger(connect(), name)
    ledger.append(replace(FIRST, reasons=('It is "good" ' * 900, "and so on")))
    (read,) = ledger.read().decisions
    assert read.reasons[-1].endswith(" [cut]")
    assert read.reasons[0].startswith('It is "good" It is "good"')
    assert len("".join(read.reasons)) > 4000
    assert replace(read, reasons=FIRST.reasons) == FIRST


def test_the_history_is_the_description_of_the_run(server: MlflowServer, name: str):
    ledger = open_ledger(connect(), name)
    ledger.describe([FIRST, replace(FIRST, number=2, reasons=("<img src=x> | [a](b)",))])
    note = MlflowClient().get_run(ledger.run_id).data.tags["mlflow.note.content"]
    newest = note.splitlines()[2]
    assert newest.startswith("| 2 | 2026-11-21T12:00:00+00:00 | promoted | 4 | 4 |")
    assert r"&#60;img src=x&#62; &#124; \[a\](b) |" in newest


def test_it_works_on_a_database_without_a_server(mlflow_client: MlflowClient):
    ledger = open_ledger(mlflow_client, "policy")
    ledger.append(FIRST)
    ledger.append(replace(FIRST, version=5))
    ledger.append(FIRST)
    assert open_ledger(mlflow_client, "policy").read().decisions == (FIRST,)


def test_a_loser_on_a_database_without_a_server_uses_what_the_winner_made(mlflow_client):
    winner = open_ledger(mlflow_client, "policy")
    client = LateClient()
    assert open_ledger(client, "policy").run_id == winner.run_id
    assert [each.name for each in mlflow_client.search_experiments(ViewType.DELETED_ONLY)] == [
        client.created
    ]


class LateClient(MlflowClient):
    """A real client that looked before the winner had made its ledger."""

    looked = False
    created = ""

    def get_experiment_by_name(self, name: str):
        if not self.looked:
            self.looked = True
            return None
        return super().get_experiment_by_name(name)

    def create_experiment(self, name: str, **more):
        self.created = name
        return super().create_experiment(name, **more)
