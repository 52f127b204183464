"""Champions on a real MLflow server: many processes, lost replies, killed and stopped processes."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient

from pipeline.registry import change_champion as registry
from pipeline.registry.aliases import read_aliases, read_version
from pipeline.registry.champion_history import Champions, stack_of
from pipeline.registry.change_champion import challenge, promote_by_hand, record_decision, roll_back
from pipeline.registry.decisions import Action, Decision
from pipeline.registry.ledger import find_ledger
from pipeline.registry.sync_aliases import sync_aliases
from pipeline.tracking.mlflow_client import connect
from ppo_core.errors import ModelError
from serving.manifest import MANIFEST_TAG
from tests.helpers.servers.fault_proxy import (
    Fault,
    FaultProxy,
    fault_proxy,
    fork,
    start_process,
    stop,
)
from tests.helpers.servers.mlflow_store import tracking_to, write_database
from tests.helpers.servers.servers import MlflowServer, shared_server
from tests.helpers.slow_cases import slow


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> str:
    """A database without a server, where nobody else is at work."""
    return write_database(tmp_path_factory.mktemp("mlflow") / "mlflow.db")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time is at work, the others are stopped or dead: nobody is worth waiting for."""
    monkeypatch.setattr("pipeline.registry.sync_aliases.TIMEOUT", 0.1)


@pytest.fixture
def model(database: str, impatient: None) -> Iterator[str]:
    """A registered model with the versions 1, 2, 3 and 4."""
    with tracking_to(database):
        yield make_versions(4)


@pytest.fixture
def server() -> Iterator[MlflowServer]:
    with tracking_to(shared_server().url):
        yield shared_server()


@pytest.fixture
def served(server: MlflowServer, impatient: None) -> str:
    """A registered model with the versions 1, 2, 3 and 4 on a server."""
    return make_versions(4)


@pytest.fixture
def proxy(served: str, server: MlflowServer) -> Iterator[FaultProxy]:
    """All MLflow of this process goes through it."""
    with fault_proxy(server.url) as running, tracking_to(running.url):
        yield running


def make_versions(count: int, name: str = "") -> str:
    client, name = connect(), name or f"policy {uuid4().hex[:8]}"
    client.create_registered_model(name)
    for _ in range(count):
        client.create_model_version(name, "s3://bucket/policy", tags={MANIFEST_TAG: "0" * 64})
    return name


def judge(model: str, version: int, *, promote: bool = True, key: str = "") -> Decision:
    """What a step does: it judges anew until nobody has decided meanwhile."""
    made = None
    while made is None:
        made = record_decision(
            model,
            version=version,
            promote=promote,
            reasons=[f"It won {50 + version} %."],
            by=f"run RLHF/{version}",
            key=key or f"RLHF/{version}",
            after=sync_aliases(model),
        )
    return made


def told(model: str) -> list[tuple[str, int, int | None]]:
    """The history: what was decided about which version, and the champion from then on."""
    history = registry.read_champions(model).decisions
    assert [decision.number for decision in history] == list(range(1, len(history) + 1))
    return [(decision.action, decision.version, decision.champion) for decision in history]


def tags(model: str, version: int) -> dict[str, str]:
    return dict(read_version(model, version).tags)


def assert_aliases(model: str, champion: int | None, previous: int | None = None) -> None:
    """The aliases are these, and what the history says."""
    aliases = read_aliases(model)
    assert (aliases.get("champion"), aliases.get("previous-champion")) == (champion, previous)
    champions = registry.read_champions(model)
    assert (champions.champion, champions.previous) == (champion, previous)
    assert sync_aliases(model) == champions


def finish(process) -> None:
    process.join(120)
    assert process.exitcode == 0


def test_a_model_without_a_history_or_a_champion_is_settled_and_nothing_is_made(model: str):
    assert sync_aliases(model) == Champions()
    assert sync_aliases("a model that nobody registered") == Champions()
    assert find_ledger(connect(), model) is None


def test_the_first_promotion_of_all_has_no_one_before_it(model: str):
    challenge(model, 1)
    assert read_aliases(model) == {"challenger": 1}
    made = judge(model, 1)
    assert made.action == "promoted"
    assert_aliases(model, 1)
    assert read_aliases(model) == {"champion": 1}
    assert tags(model, 1) == {
        MANIFEST_TAG: "0" * 64,
        "promotion": "promoted",
        "promotion_reasons": "It won 51 %.",
        "promotion_at": made.at,
        "promotion_by": "run RLHF/1",
    }


def test_a_promotion_moves_both_aliases_and_a_refusal_leaves_its_challenger(model: str):
    judge(model, 1)
    judge(model, 2)
    assert_aliases(model, 2, previous=1)
    challenge(model, 3)
    judge(model, 3, promote=False)
    assert_aliases(model, 2, previous=1)
    assert read_aliases(model)["challenger"] == 3
    assert tags(model, 3)["promotion"] == "refused"
    assert told(model) == [("promoted", 1, 1), ("promoted", 2, 2), ("refused", 3, 2)]


def test_the_challenger_never_goes_down_nor_back_to_a_version_that_was_decided_about(model: str):
    challenge(model, 3)
    challenge(model, 2)
    assert read_aliases(model)["challenger"] == 3
    judge(model, 3)
    challenge(model, 3)
    assert "challenger" not in read_aliases(model)
    with pytest.raises(ModelError, match="has no version 9, or"):
        challenge(model, 9)


def test_a_candidate_never_replaces_a_champion_with_a_higher_number_except_by_hand(model: str):
    judge(model, 3)
    made = judge(model, 2)
    assert made.action == "refused"
    assert made.reasons == (
        "Version 3, which was registered later, is already champion.",
        "It won 52 %.",
    )
    assert_aliases(model, 3)
    promote_by_hand(model, 2, reason="Version 3 swears.", by="person ada")
    assert_aliases(model, 2, previous=3)
    assert tags(model, 2)["promotion_by"] == "person ada"


def test_a_step_that_is_retried_after_it_decided_gives_the_same_decision(model: str):
    before = sync_aliases(model)
    first = judge(model, 1)
    judge(model, 2)
    again = partial(
        record_decision, model, version=1, promote=False, reasons=["No."], by="run", key="RLHF/1"
    )
    assert again(after=before) == again(after=sync_aliases(model)) == first
    assert told(model) == [("promoted", 1, 1), ("promoted", 2, 2)]
    assert_aliases(model, 2, previous=1)


def test_a_judgement_against_champions_of_the_past_decides_nothing(model: str):
    before = sync_aliases(model)
    judge(model, 1)
    late = record_decision(
        model, version=2, promote=True, reasons=["Old."], by="run", key="late", after=before
    )
    assert late is None
    assert told(model) == [("promoted", 1, 1)]


def race(model: str, versions: Sequence[int], processes: int, url: str) -> None:
    """Judge all versions at once, in threads of several processes."""
    start = fork.Barrier(len(versions))

    def work(mine: Sequence[int]) -> None:
        failed: list[BaseException] = []

        def one(version: int) -> None:
            start.wait()
            try:
                judge(model, version)
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=one, args=(version,)) for version in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(len(failed))

    shares = [versions[first::processes] for first in range(processes)]
    running = [start_process(partial(work, share), url) for share in shares]
    for process in running:
        process.join(280)
        assert process.exitcode == 0


def assert_nothing_was_lost(model: str, versions: Sequence[int]) -> None:
    history = told(model)
    assert sorted(version for _, version, _ in history) == sorted(versions)
    promoted = [version for action, version, _ in history if action == "promoted"]
    assert promoted == sorted(promoted)
    assert_aliases(model, max(versions), previous=promoted[-2] if promoted[1:] else None)
    for action, version, _ in history:
        assert tags(model, version)["promotion"] == action


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy stops a process for seconds, and it is no less at work."""
    monkeypatch.setattr("pipeline.registry.sync_aliases.TIMEOUT", 60.0)


def test_concurrent_promotions_all_count(server, patient):
    name = make_versions(4)
    race(name, [1, 2, 3, 4], processes=2, url=server.url)
    assert_nothing_was_lost(name, [1, 2, 3, 4])


@pytest.mark.slow
def test_twenty_concurrent_promotions_leave_one_champion_and_a_complete_history(server, patient):
    name = make_versions(20)
    race(name, range(1, 21), processes=4, url=server.url)
    assert_nothing_was_lost(name, range(1, 21))


@pytest.mark.parametrize("times", [1, *slow(99)])
@pytest.mark.parametrize("path", ["log-parameter", "alias", "model-versions/set-tag"])
def test_lost_replies_leave_one_decision(served: str, proxy: FaultProxy, path: str, times: int):
    judge(served, 1)
    fault = proxy.add(Fault(path, drop=True, times=times))
    if path == "log-parameter":
        fault.word = '"0002"'  # The marks that follow are answered.
    try:
        judge(served, 2)
    except ModelError:
        assert times == 99
    assert fault.happened.is_set()
    fault.times = 0
    judge(served, 2)
    assert told(served) == [("promoted", 1, 1), ("promoted", 2, 2)]
    assert_aliases(served, 2, previous=1)


def killed_after_appending(model: str, proxy: FaultProxy, version: int) -> None:
    """A process that is killed with -9 when its decision is appended, and nothing else is done."""
    pid: SimpleQueue[int] = SimpleQueue()
    fault = proxy.add(Fault("log-parameter", after=lambda: os.kill(pid.get(), signal.SIGKILL)))
    process = start_process(lambda: judge(model, version), proxy.url)
    pid.put(process.pid)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert fault.happened.is_set()


def test_what_a_killed_process_had_decided_is_carried_out_by_the_next(served: str, proxy):
    judge(served, 1)
    challenge(served, 2)
    killed_after_appending(served, proxy, 2)
    assert read_aliases(served) == {"champion": 1, "challenger": 2}
    assert "promotion" not in tags(served, 2)
    assert sync_aliases(served).champion == 2
    assert_aliases(served, 2, previous=1)
    assert "challenger" not in read_aliases(served)
    assert tags(served, 2)["promotion"] == "promoted"
    assert told(served) == [("promoted", 1, 1), ("promoted", 2, 2)]


def test_what_a_person_did_after_a_process_was_killed_is_not_undone(served: str, proxy):
    judge(served, 1)
    killed_after_appending(served, proxy, 2)
    connect().set_registered_model_alias(served, "champion", "4")
    assert sync_aliases(served).champion == 4
    assert told(served) == [("promoted", 1, 1), ("promoted", 2, 2), ("found", 4, 4)]
    assert_aliases(served, 4, previous=2)
    assert tags(served, 2)["promotion"] == "promoted"


def test_a_version_deleted_before_its_promotion_was_carried_out_is_no_champion(served, proxy):
    judge(served, 1)
    killed_after_appending(served, proxy, 2)
    connect().delete_model_version(served, "2")
    assert sync_aliases(served).champion == 1
    assert told(served) == [("promoted", 1, 1), ("promoted", 2, 2), ("found", 1, 1)]
    # Version 2, which was the one before, is no longer there either.
    assert read_aliases(served) == {"champion": 1}


@pytest.fixture
def zombie(server, served: str) -> Iterator:
    """Starts a process that judges version 2 and stops at a request of its own."""
    with fault_proxy(server.url) as between:

        def start(path: str, word: str = ""):
            pid: SimpleQueue[int] = SimpleQueue()
            fault = between.add(Fault(path, word, after=lambda: stop(pid.get())))
            process = start_process(lambda: judge(served, 2), between.url)
            pid.put(process.pid)
            assert fault.happened.wait(120)
            return process

        yield start


def wake(process) -> None:
    os.kill(process.pid, signal.SIGCONT)
    finish(process)


def test_a_zombie_that_had_read_the_state_never_promotes_over_a_newer_champion(served, zombie):
    judge(served, 1)
    process = zombie("model-versions/get")
    judge(served, 3)
    wake(process)
    assert told(served) == [("promoted", 1, 1), ("promoted", 3, 3), ("refused", 2, 3)]
    assert_aliases(served, 3, previous=1)


@pytest.mark.parametrize(
    "stopped_at", ["log-parameter", *slow("model-versions/set-tag", "runs/set-tag")]
)
def test_a_zombie_that_had_appended_leaves_the_newer_champion(served, zombie, stopped_at: str):
    judge(served, 1)
    process = zombie(stopped_at)
    judge(served, 3)
    wake(process)
    history = [("promoted", 1, 1), ("promoted", 2, 2), ("promoted", 3, 3)]
    assert told(served) == history
    assert_aliases(served, 3, previous=2)


def test_a_zombie_that_had_begun_with_the_tags_leaves_those_of_later_decisions(served, zombie):
    judge(served, 1)
    process = zombie("model-versions/set-tag")
    roll_back(served, reason="It swears.", by="person ada")
    judge(served, 3)
    wake(process)
    assert_aliases(served, 3, previous=1)
    assert tags(served, 2)["promotion"] == "withdrawn"
    assert tags(served, 2)["promotion_reasons"] == "It swears."


def test_a_zombie_whose_alias_arrives_late_puts_it_right(server, served: str, proxy):
    judge(served, 1)
    newer = threading.Event()
    late = proxy.add(Fault("alias", '"champion"', before=lambda: newer.wait(100) or None))
    process = start_process(lambda: judge(served, 2), proxy.url)
    while not any(decision.version == 2 for decision in registry.read_champions(served).decisions):
        time.sleep(0.1)
    judge(served, 3)
    roll_back(served, reason="No.", by="person ada")
    judge(served, 4)
    newer.set()
    finish(process)
    assert late.happened.is_set()
    assert told(served)[2:] == [("promoted", 3, 3), ("rolled back", 3, 2), ("promoted", 4, 4)]
    assert_aliases(served, 4, previous=2)
    assert [tags(served, version)["promotion"] for version in (2, 3, 4)] == [
        "promoted",
        "withdrawn",
        "promoted",
    ]


def test_an_attempt_that_runs_twice_at_once_decides_once(served: str, zombie):
    judge(served, 1)
    process = zombie("model-versions/get")
    made = judge(served, 2)
    wake(process)
    assert registry.read_champions(served).decisions[1:] == (made,)
    assert_aliases(served, 2, previous=1)


def test_an_alias_moved_by_hand_is_taken_over(model: str):
    judge(model, 1)
    connect().set_registered_model_alias(model, "champion", "3")
    judged = registry.read_champions(model)
    assert (
        record_decision(model, version=4, promote=True, reasons=[], by="run", key="k", after=judged)
        is None
    )
    assert told(model) == [("promoted", 1, 1), ("found", 3, 3)]
    assert_aliases(model, 3, previous=1)
    assert tags(model, 3)["promotion_reasons"] == (
        "The alias champion was moved in MLflow from version 1 to version 3."
    )
    roll_back(model, reason="Back.", by="person ada")
    assert_aliases(model, 1)


def test_a_champion_from_before_the_history_is_taken_over(model: str):
    connect().set_registered_model_alias(model, "champion", "2")
    assert sync_aliases(model).champion == 2
    assert told(model) == [("found", 2, 2)]
    judge(model, 3)
    assert_aliases(model, 3, previous=2)


@pytest.mark.parametrize("how", ["alias", "version"])
def test_an_alias_or_a_champion_deleted_by_hand_leaves_no_champion(model: str, how: str):
    judge(model, 1)
    judge(model, 2)
    if how == "alias":
        connect().delete_registered_model_alias(model, "champion")
    else:
        connect().delete_model_version(model, "2")
    assert sync_aliases(model).champion is None
    assert told(model)[2:] == [("found", 2, None)]
    assert_aliases(model, None)
    judge(model, 3)
    assert_aliases(model, 3)


def test_a_rollback_brings_back_the_one_before_as_often_as_there_is_one(model: str):
    for version in (1, 2, 3):
        judge(model, version)
    made = roll_back(model, reason="It swears.", by="person ada")
    assert (made.version, made.champion) == (3, 2)
    assert_aliases(model, 2, previous=1)
    assert tags(model, 3)["promotion"] == "withdrawn"
    assert tags(model, 3)["promotion_reasons"] == "It swears."
    roll_back(model, reason="So does this.", by="person ada")
    assert_aliases(model, 1)
    with pytest.raises(ModelError, match="replaced no other version, so no version can"):
        roll_back(model, reason="Again.", by="person ada")
    assert len(told(model)) == 5


def test_a_version_that_comes_back_is_no_longer_called_withdrawn(model: str):
    judge(model, 1)
    judge(model, 2)
    roll_back(model, reason="No.", by="person ada")
    promote_by_hand(model, 2, reason="Yes.", by="person ada")
    judge(model, 3)
    roll_back(model, reason="No.", by="person ada")
    assert_aliases(model, 2, previous=1)
    assert tags(model, 2)["promotion"] == "promoted"


def test_without_a_champion_there_is_nothing_to_roll_back(model: str):
    with pytest.raises(ModelError, match="has no champion that could be withdrawn"):
        roll_back(model, reason="No.", by="person ada")
    assert find_ledger(connect(), model) is None


def test_a_rollback_to_a_deleted_version_names_the_next_move(model: str):
    judge(model, 1)
    judge(model, 2)
    connect().delete_model_version(model, "1")
    with pytest.raises(ModelError, match=r"Version 1 .* was deleted .*registry.py promote 'policy"):
        roll_back(model, reason="No.", by="person ada")
    assert told(model) == [("promoted", 1, 1), ("promoted", 2, 2)]


def test_a_rollback_withdraws_the_champion_that_was_there_when_it_was_asked(
    server,
    served: str,
    proxy: FaultProxy,
    monkeypatch,
):
    judge(served, 1)
    judge(served, 2)

    def meanwhile() -> None:
        finish(start_process(lambda: judge(served, 3), server.url))

    proxy.add(Fault("model-versions/get", before=meanwhile))
    with pytest.raises(ModelError, match=r"changed from version 2 to version 3 after your"):
        roll_back(served, reason="No.", by="person ada")
    assert_aliases(served, 3, previous=2)


def test_a_rollback_after_the_alias_was_deleted_says_that_there_is_no_champion(model: str):
    judge(model, 1)
    connect().delete_registered_model_alias(model, "champion")
    with pytest.raises(ModelError, match=r"changed from version 1 to no version after your"):
        roll_back(model, reason="No.", by="person ada", champion=1)
    assert_aliases(model, None)


def test_promotions_by_hand_of_nothing_and_of_the_champion_are_refused(model: str):
    judge(model, 1)
    with pytest.raises(ModelError, match="has no version 9, or"):
        promote_by_hand(model, 9, reason="Why not.", by="person ada")
    with pytest.raises(ModelError, match=r"Version 1 of .* is the champion already"):
        promote_by_hand(model, 1, reason="Why not.", by="person ada")
    with pytest.raises(ModelError, match="has no version 9, or"):
        judge(model, 9)
    assert told(model) == [("promoted", 1, 1)]


def test_a_version_without_a_manifest_is_not_promoted_by_hand(model: str):
    judge(model, 1)
    connect().delete_model_version_tag(model, "2", MANIFEST_TAG)
    with pytest.raises(
        ModelError, match=r"Version 2 of .* has no tag 'manifest'.*would refuse this champion"
    ):
        promote_by_hand(model, 2, reason="Why not.", by="person ada")
    assert told(model) == [("promoted", 1, 1)]


def test_long_reasons_are_whole_in_the_tag_and_cut_in_the_history(model: str):
    reason = "It won. " * 900
    made = promote_by_hand(model, 1, reason=reason, by="person ada")
    assert made.reasons[0].endswith(" [cut]")
    assert tags(model, 1)["promotion_reasons"] == reason.strip()


def test_control_characters_cannot_stop_a_decision_from_being_carried_out(model: str):
    promote_by_hand(model, 1, reason="a\x00b\x1b[31m\ud800\nc", by="person ada")
    assert tags(model, 1)["promotion_reasons"] == "a b [31m  c"


def test_a_deleted_history_is_an_error_and_no_decision_is_made_without_it(model: str):
    judge(model, 1)
    client = connect()
    experiment = client.get_experiment_by_name(f"promotions of {model}").experiment_id
    client.delete_experiment(experiment)
    with pytest.raises(ModelError, match="Restore it with"):
        judge(model, 2)
    client.restore_experiment(experiment)
    judge(model, 2)
    assert_aliases(model, 2, previous=1)


def test_a_model_registered_anew_under_its_old_name_begins_without_a_champion(model: str):
    judge(model, 3)
    connect().delete_registered_model(model)
    make_versions(2, model)
    judge(model, 1, key="another run")
    assert_aliases(model, 1)


def test_it_works_on_a_database_without_a_server(mlflow_client: MlflowClient):
    make_versions(3, "policy")
    judge("policy", 1)
    judge("policy", 2)
    roll_back("policy", reason="No.", by="person ada")
    promote_by_hand("policy", 3, reason="Yes.", by="person ada")
    assert_aliases("policy", 3, previous=1)


def replay(moves: Sequence[tuple[Action, int]]) -> tuple[Decision, ...]:
    """Decisions as they would have been made one after the other; impossible ones left out."""
    made: list[Decision] = []
    for action, version in moves:
        now = Champions(tuple(made))
        champion: int | None = version
        if action == "refused":
            champion = now.champion
        elif action == "rolled back":
            if now.previous is None:
                continue
            version, champion = now.champion, now.previous
        elif action == "found" and version > 4:
            if now.champion is None:
                continue
            version, champion = now.champion, None
        fields = {"reasons": (), "by": "", "at": "", "key": str(len(made))}
        made.append(
            Decision(
                number=len(made) + 1, action=action, version=version, champion=champion, **fields
            )
        )
    return tuple(made)


actions = st.sampled_from(["promoted", "refused", "rolled back", "found"])
histories = st.lists(st.tuples(actions, st.integers(1, 6)), max_size=30).map(replay)


def test_the_stack_of_champions_done_by_hand():
    moves = [("promoted", 1), ("refused", 2), ("promoted", 3), ("found", 2), ("rolled back", 0)]
    history = replay([*moves, ("promoted", 3), ("found", 5), ("promoted", 4)])
    stacks = [stack_of(history[:end]) for end in range(len(history) + 1)]
    assert stacks == [
        *[(), (1,), (1,), (1, 3), (1, 3, 2), (1, 3)],
        *[(1, 3), (), (4,)],
    ]


@given(histories)
def test_each_decision_names_the_champion_that_the_replay_has_after_it(history):
    for end, decision in enumerate(history, start=1):
        assert Champions(history[:end]).champion == decision.champion


@given(histories)
def test_the_one_before_is_never_the_champion_itself(history):
    stack = stack_of(history)
    assert all(above != below for below, above in pairwise(stack))


@given(histories, st.integers(1, 6))
def test_a_rollback_undoes_a_promotion(history, version: int):
    below = stack_of(history)
    if below and version != below[-1]:
        promoted, undone = (
            replace(history[0], action=action, version=version, champion=champion)
            for action, champion in (("promoted", version), ("rolled back", below[-1]))
        )
        assert stack_of((*history, promoted)) == (*below, version)
        assert stack_of((*history, promoted, undone)) == below


@given(histories)
def test_a_refusal_changes_nothing(history):
    others = [decision for decision in history if decision.action != "refused"]
    assert stack_of(others) == stack_of(history)


@given(histories)
def test_only_versions_that_were_once_promoted_or_found_are_champions(history):
    raised = {each.version for each in history if each.action in ("promoted", "found")}
    assert set(stack_of(history)) <= raised
