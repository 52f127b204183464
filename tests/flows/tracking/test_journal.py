"""The journal of what is to be tracked: nothing is lost, doubled or out of order."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tracking.journal import Journal
from pipeline.tracking.run_log import FIGURES, RunLog, read_figures
from tests.helpers.paths import ROOT


def entries(journal: Journal) -> list[dict]:
    return [entry for entry, _ in journal.unsent()]


def metrics(found: list[dict]) -> list[tuple[str, int | None, str, float]]:
    """All single metrics, in order."""
    return [
        (entry["run"], entry["step"], name, value)
        for entry in found
        if entry["kind"] == "metrics"
        for name, value in entry["values"].items()
    ]


def test_entries_come_back_in_order_also_from_another_object(tmp_path: Path):
    journal = Journal(tmp_path)
    before = time.time() * 1000
    journal.set_status("r", "RUNNING")
    journal.log_metrics("r", {"loss": 0.5, "lr": 1}, step=1)
    journal.set_tag("r", "verdict", "fit")
    journal.add_file("r", tmp_path / "page.html", "reward-model")
    for each in (journal, Journal(tmp_path)):
        found = entries(each)
        assert [entry["kind"] for entry in found] == ["status", "metrics", "tag", "file"]
        assert all(before - 1 <= entry["time"] <= time.time() * 1000 for entry in found)
    assert found[1]["values"] == {"loss": 0.5, "lr": 1.0}
    assert found[3]["path"] == str(tmp_path / "page.html")


def test_what_was_sent_does_not_come_back(tmp_path: Path):
    journal = Journal(tmp_path)
    for step in range(5):
        journal.log_metrics("r", {"loss": step}, step=step)
    journal.mark_sent(journal.unsent()[2][1])
    assert [entry["step"] for entry in entries(Journal(tmp_path))] == [3, 4]
    assert [entry["step"] for entry, _ in journal.unsent(limit=1)] == [3]
    journal.mark_sent(journal.end())
    assert entries(journal) == []


def test_values_survive_to_the_bit(tmp_path: Path):
    values = {"a": 0.1 + 0.2, "b": 1e-308, "inf": math.inf, "low": -math.inf, "nan": math.nan}
    Journal(tmp_path).log_metrics("r", values, step=1)
    (entry,) = entries(Journal(tmp_path))
    assert math.isnan(entry["values"].pop("nan"))
    assert entry["values"] == {name: value for name, value in values.items() if name != "nan"}


def test_a_metric_of_a_step_is_kept_once_as_it_was_measured_first(tmp_path: Path):
    Journal(tmp_path).log_metrics("r", {"loss": 0.5, "eps": 9.0}, step=1)
    retried = Journal(tmp_path)
    retried.log_metrics("r", {"loss": 0.5, "eps": 8.0}, step=1)
    retried.log_metrics("r", {"loss": 0.5, "eval/loss": 0.7}, step=1)
    retried.log_metrics("r", {"loss": 0.5}, step=2)
    retried.log_metrics("other", {"loss": 0.5}, step=1)
    assert metrics(entries(retried)) == [
        ("r", 1, "loss", 0.5),
        ("r", 1, "eps", 9.0),
        ("r", 1, "eval/loss", 0.7),
        ("r", 2, "loss", 0.5),
        ("other", 1, "loss", 0.5),
    ]


def test_a_figure_of_the_whole_run_is_kept_again_when_it_has_changed(tmp_path: Path):
    for win_rate in (0.5, 0.5, 0.6, 0.5):
        Journal(tmp_path).log_metrics("r", {"win_rate": win_rate, "nan": math.nan})
    found = [value for *_, name, value in metrics(entries(Journal(tmp_path))) if name != "nan"]
    assert found == [0.5, 0.6, 0.5]
    assert len(metrics(entries(Journal(tmp_path)))) == 4


def test_a_tag_is_kept_again_when_it_has_changed(tmp_path: Path):
    for value in ("a", "a", "b", "a"):
        Journal(tmp_path).set_tag("r", "key", value)
    assert [entry["value"] for entry in entries(Journal(tmp_path))] == ["a", "b", "a"]
    assert Journal(tmp_path).tag("r", "key") == "a"
    assert Journal(tmp_path).tag("other", "key") is None


def test_the_content_of_an_artifact_stays_beside_the_journal(tmp_path: Path):
    journal = Journal(tmp_path)
    for text in (b"first", b"second"):
        journal.write_file("r", "reward-model/page.html", text)
    assert {entry["folder"] for entry in entries(journal)} == {"reward-model"}
    assert [Path(entry["path"]).read_bytes() for entry in entries(journal)] == [b"second"] * 2
    assert [path.name for path in (tmp_path / "files" / "r").rglob("*.*")] == ["page.html"]


def test_counting_goes_on_after_the_last_step_of_these_names(tmp_path: Path):
    journal = Journal(tmp_path)
    assert journal.next_step("r", "system/") == 0
    journal.log_metrics("r", {"system/cpu": 1.0}, step=0)
    journal.log_metrics("r", {"system/cpu": 1.0}, step=1)
    journal.log_metrics("r", {"loss": 1.0}, step=7)
    journal.log_metrics("other", {"system/cpu": 1.0}, step=9)
    assert Journal(tmp_path).next_step("r", "system/") == 2


def test_half_a_line_goes_wherever_it_was_cut(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.log_metrics("r", {"loss": 1.0}, step=1)
    first = journal.end()
    journal.log_metrics("r", {"loss": 2.0}, step=2)
    whole = journal.path.read_bytes()
    for length in range(first, len(whole)):
        journal.path.write_bytes(whole[:length])
        assert [entry["step"] for entry in entries(journal)] == [1]  # is not sent as it is
        again = Journal(tmp_path)
        again.log_metrics("r", {"loss": 1.0}, step=1)
        again.log_metrics("r", {"loss": 2.0}, step=2)
        assert metrics(entries(again)) == [("r", 1, "loss", 1.0), ("r", 2, "loss", 2.0)]


def test_a_spoilt_line_is_an_entry_of_its_own_and_hides_no_other(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.log_metrics("r", {"loss": 1.0}, step=1)
    with journal.path.open("ab") as file:
        file.write(b"\0\0\0\xff\n[1]\n")
    journal.log_metrics("r", {"loss": 2.0}, step=2)
    assert [entry["kind"] for entry in entries(Journal(tmp_path))] == [
        *("metrics", "spoilt", "spoilt", "metrics")
    ]


def test_a_journal_that_lost_what_was_sent_sends_what_comes(tmp_path: Path):
    journal = Journal(tmp_path)
    for step in range(9):
        journal.log_metrics("r", {"loss": 1.0}, step=step)
    journal.mark_sent(journal.end())
    journal.path.write_bytes(b"")
    after = Journal(tmp_path)
    after.log_metrics("r", {"loss": 1.0}, step=9)
    assert [entry["step"] for entry in entries(after)] == [9]
    (tmp_path / "journal.sent").write_text("")
    assert [entry["step"] for entry in entries(Journal(tmp_path))] == [9]


def test_threads_and_processes_write_whole_lines_and_a_metric_once(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from pipeline.tracking.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); print('ready', flush=True); input()\n"
        "for step in range(4000): journal.log_metrics('r', {'loss': step, 'lr': 1}, step)\n"
    )
    processes = [run(code, tmp_path) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    journal = Journal(tmp_path)

    def write(name: str) -> None:
        for step in range(4000):
            journal.log_metrics("r", {name: step}, step)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("loss", "mine")]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(60) for process in processes] == [0, 0]
    found = [(name, step) for _, step, name, _ in metrics(entries(Journal(tmp_path)))]
    assert len(found) == len(set(found)) == 12_000


def test_a_writer_killed_at_any_moment_leaves_whole_entries(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from pipeline.tracking.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); step = journal.next_step('r', '')\n"
        "while True:\n"
        "    journal.log_metrics('r', {f'm{n}': n for n in range(200)}, step); step += 1\n"
    )
    for kills in range(1, 4):
        process = run(code, tmp_path)
        wait_for(lambda: Journal(tmp_path).next_step("r", "") > 50 * kills)  # noqa: B023
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = entries(Journal(tmp_path))
    assert [entry["step"] for entry in found] == list(range(len(found)))
    assert {len(entry["values"]) for entry in found} == {200}


def test_one_sends_at_a_time_and_the_next_when_that_one_is_killed(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from pipeline.tracking.journal import Journal\n"
        "with Journal(Path(sys.argv[1])).sending() as alone:\n"
        "    print(alone, flush=True); time.sleep(60)\n"
    )
    process = run(code, tmp_path)
    assert process.stdout.readline() == "True\n"
    with Journal(tmp_path).sending() as alone:
        assert not alone
    process.kill()
    process.wait()
    with Journal(tmp_path).sending() as alone, Journal(tmp_path).sending() as second:
        assert (alone, second) == (True, False)
    with Journal(tmp_path).sending() as alone:
        assert alone


def test_what_is_refused_is_set_aside_with_the_reason(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.refuse({"kind": "tag", "run": "r"}, "too long")
    assert [json.loads(line) for line in journal.refused.read_text().splitlines()] == [
        {"kind": "tag", "run": "r", "refused": "too long"}
    ]


def test_a_line_for_which_there_is_no_room_is_said_and_goes(tmp_path: Path):
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from pipeline.tracking.journal import Journal\n"
        "from ppo_core.errors import TrainingError\n"
        "journal = Journal(Path(sys.argv[1])); journal.log_metrics('r', {'loss': 1}, 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (journal.end() + 20, -1))\n"
        "try: journal.log_metrics('r', {'loss': 2}, 2)\n"
        "except TrainingError as error: print(error)\n"
    )
    process = run(code, tmp_path)
    said = process.communicate()[0]
    assert "No space left for a line of the journal" in said and "journal.jsonl" in said
    journal = Journal(tmp_path)
    journal.log_metrics("r", {"loss": 3.0}, 3)
    assert metrics(entries(journal)) == [("r", 1, "loss", 1.0), ("r", 3, "loss", 3.0)]


LOGS = st.tuples(
    st.just("log"),
    st.sampled_from(["r", "s"]),
    st.integers(0, 5),
    st.sets(st.sampled_from("abc"), min_size=1),
)
DELIVERIES = st.tuples(st.just("deliver"), st.integers(1, 4), st.booleans())
KILLS = st.tuples(st.just("kill"), st.integers(0, 40))


@settings(max_examples=80, deadline=None)
@given(actions=st.lists(LOGS | DELIVERIES | KILLS, max_size=30))
def test_whatever_is_killed_whenever_each_metric_arrives_once_in_order(tmp_path_factory, actions):
    """A server that stores what it has once, as MLflow does; a sender that dies before it notes."""
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    logged: dict[tuple, float] = {}
    stored: dict[tuple, int] = {}

    def deliver(limit: int | None, noted: bool) -> None:
        for entry, position in journal.unsent(limit):
            for name, value in entry["values"].items():
                stored.setdefault((entry["run"], entry["step"], name, value, entry["time"]), 0)
            if noted:
                journal.mark_sent(position)

    for number, action in enumerate(actions):
        match action:
            case ("log", run, step, names):
                journal.log_metrics(run, dict.fromkeys(names, number), step)
                for name in sorted(names):
                    logged.setdefault((run, step, name), float(number))
            case ("deliver", limit, noted):
                deliver(limit, noted)
            case ("kill", torn):
                line = b'{"kind": "metrics", "run": "r", "step": 1, "values": {}}'[:torn]
                with journal.path.open("ab") as file:
                    file.write(line)
                journal = Journal(folder)
    deliver(None, True)
    assert journal.unsent() == []
    assert {key[:3]: key[3] for key in stored} == logged
    assert len(stored) == len(logged)
    assert [value for *_, value, _ in stored] == sorted(logged.values())


def run(code: str, folder: Path) -> subprocess.Popen[str]:
    """A process of its own that runs `code` with the folder as its argument."""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_damaged_figures_are_told_and_the_next_ones_are_logged(tmp_path: Path, capsys):
    log = RunLog(Journal(tmp_path), "r")
    path = log.journal.path_of("r", FIGURES)
    log.log_figures({"a": 1.0})
    log.log_figures({"b": math.nan})
    assert read_figures(path.read_text()) == {"a": 1.0, "b": None}
    assert capsys.readouterr().out == ""
    for damaged in ("", '{"columns": ["figure", "value"], "data": [7]}'):
        path.write_text(damaged)
        log.log_figures({"c": 2.0})
        assert read_figures(path.read_text()) == {"c": 2.0}
        assert f"Warning: {path} is damaged: " in capsys.readouterr().out
