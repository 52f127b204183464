"""The page on which a person labels pairs, in a real browser and by plain requests."""

import json
import threading
import time
from pathlib import Path

import pytest
import requests

import feedback
from human_feedback.label_server import label_server
from human_feedback.labeling import Labeling
from human_feedback.read_opinions import read_pairs
from pipeline.inputs.human_labels_to_pairs import votes_of
from ppo_core.data.rows.read_rows import read_rows
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.servers.browser import CHROMEDRIVER, CHROMIUM, Browser, chromium
from tests.helpers.servers.label_page import served

HOSTILE = "<img src=https://evil.example/x onerror=alert(1)><script>document.title='owned'</script>"


def write_pairs(folder: Path, count: int = 20) -> str:
    rows = [
        {"prompt": f"prompt {n}", "first": f"good {n}", "second": f"bad {n}", "label": ""}
        for n in range(count)
    ]
    rows[0]["prompt"] = HOSTILE
    return write_rows(folder / "to-label.jsonl", rows)


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def press(browser: Browser, key: str, until: str) -> None:
    """Press a key, and wait until the page shows this count."""
    browser.run(
        "document.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))",
        key,
    )
    wait_for(browser, until)


def wait_for(browser: Browser, count: str) -> None:
    deadline = time.monotonic() + 20
    while browser.run("return document.getElementById('count').textContent") != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver")
def test_twenty_pairs_are_labeled_by_keyboard_and_continued_after_closing(tmp_path: Path):
    pairs, file = write_pairs(tmp_path), tmp_path / "labeled.jsonl"
    sides = set()
    with chromium(tmp_path) as browser:
        for done in (range(12), range(12, 20)):
            with served(pairs, file) as address:
                browser.open(address)
                wait_for(browser, f"{done[0]} of 20")
                assert browser.accessibility_violations() == []
                for number in done:
                    left = browser.run("return document.getElementById('left').textContent")
                    sides.add(left.split()[0])
                    press(browser, "1" if left.startswith("good") else "2", f"{number + 1} of 20")
                if done[0] == 0:
                    press(browser, "u", "11 of 20")
                    press(browser, "0", "12 of 20")
        assert not browser.run("return document.getElementById('end').hidden")
        assert browser.run("return document.title") == "Which answer is better?"
        assert not [one for one in browser.asked if "evil" in one]
    assert sides == {"good", "bad"}
    rows = read(file)
    assert [row["label"] for row in rows] == ["first"] * 11 + ["tie"] + ["first"] * 8
    assert rows[0]["prompt"] == HOSTILE
    # The labels are votes, and preferences.
    assert len(read_rows(str(file), "votes")) == len(read_rows(str(file), "pairs")) == 20


def test_two_people_label_into_one_file_at_a_time_and_skipped_pairs_come_again(tmp_path: Path):
    pairs, file = write_pairs(tmp_path, 2), tmp_path / "labeled.jsonl"
    with served(pairs, file, "ann") as ann, served(pairs, file, "bob") as bob:
        for choice in ("left", "skip"):
            for address in (ann, bob):
                number = requests.get(f"{address}pair", timeout=10).json()["pair"]["number"]
                sent = {"label": choice, "number": number}
                reply = requests.post(f"{address}pair", json=sent, timeout=10).json()
                # A label that is sent twice counts once.
                assert requests.post(f"{address}pair", json=sent, timeout=10).json() == reply
        assert reply == {"pair": None, "done": 2, "total": 2}
        assert [row["annotator"] for row in read(file)] == ["ann", "bob"]
        requests.post(f"{bob}pair", json={"label": "undo"}, timeout=10)
        requests.post(f"{bob}pair", json={"label": "undo"}, timeout=10)
        assert [row["annotator"] for row in read(file)] == ["ann"]
    with served(pairs, file, "ann") as address:
        assert requests.get(f"{address}pair", timeout=10).json()["done"] == 1


def test_a_person_with_two_pages_labels_a_pair_once(tmp_path: Path):
    pairs, file = votes_of(read_pairs(write_pairs(tmp_path, 2))), tmp_path / "labeled.jsonl"
    first, second = Labeling(pairs, "ann", file), Labeling(pairs, "ann", file)
    first.label(0, "left")
    saved = read(file)
    second.label(0, "right")
    assert read(file) == saved
    assert second.done == 1
    second.label(1, "right")
    assert len(read(file)) == 2
    first.label(1, "left")
    second.undo()
    assert read(file) == saved


def test_undo_takes_back_no_label_of_another_page(tmp_path: Path):
    pairs, file = votes_of(read_pairs(write_pairs(tmp_path, 3))), tmp_path / "labeled.jsonl"
    first, second = Labeling(pairs, "ann", file), Labeling(pairs, "ann", file)
    first.label(0, "left")
    second.label(2, "skip")
    first.label(1, "left")
    saved = read(file)
    second.label(0, "right")
    second.undo()
    assert read(file) == saved
    assert second.skipped == set()


def test_undo_leaves_the_labels_of_other_pairs(tmp_path: Path):
    file = tmp_path / "labeled.jsonl"
    rows = [{"prompt": "other", "first": "a", "second": "b", "label": "first", "annotator": "ann"}]
    write_rows(file, rows)
    labeling = Labeling(votes_of(read_pairs(write_pairs(tmp_path, 2))), "ann", file)
    labeling.undo()
    assert read(file) == rows


def test_undo_takes_back_the_last_action_be_it_a_label_or_a_skip(tmp_path: Path):
    file = tmp_path / "labeled.jsonl"
    labeling = Labeling(votes_of(read_pairs(write_pairs(tmp_path, 4))), "ann", file)
    for number, choice in enumerate(["left", "skip", "right", "skip"]):
        labeling.label(number, choice)
    left = []
    for _ in range(5):
        labeling.undo()
        left.append((len(read(file)), len(labeling.skipped), labeling.done))
    assert left == [(2, 1, 3), (1, 1, 2), (1, 0, 1), (0, 0, 0), (0, 0, 0)]


def test_only_the_page_of_this_machine_can_send_labels(tmp_path: Path):
    pairs, file = write_pairs(tmp_path, 2), tmp_path / "labeled.jsonl"
    sent = {"label": "left", "number": 0}
    with served(pairs, file) as address:
        root = address.rstrip("/").rpartition("/")[0]
        replies = [
            requests.post(f"{root}/pair", json=sent, timeout=10),
            requests.post(f"{root}/guess/pair", json=sent, timeout=10),
            requests.post(
                f"{address}pair", json=sent, headers={"Host": "evil.example"}, timeout=10
            ),
            requests.get(address, headers={"Host": "evil.example"}, timeout=10),
            requests.get(f"{address}../../etc/passwd", timeout=10),
            requests.post(f"{address}pair", json={"label": "left", "number": 7}, timeout=10),
            requests.post(f"{address}pair", json={"label": "best", "number": 0}, timeout=10),
            requests.post(f"{address}pair", json=["left"], timeout=10),
            requests.post(f"{address}pair", data=b"\xff", timeout=10),
            requests.post(
                f"{address}pair", data=b'{"label": "left", "number": Infinity}', timeout=10
            ),
            requests.post(f"{address}pair", data=b"x" * 20_000, timeout=10),
            requests.post(f"{address}pair", data=iter([b"{}"]), timeout=10),
        ]
        page = requests.get(address, timeout=10)
    assert [reply.status_code for reply in replies] == [404] * 5 + [400] * 5 + [413, 411]
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert not file.exists()


def test_browsers_leave_out_the_port_80(tmp_path: Path):
    labeling = Labeling(votes_of(read_pairs(write_pairs(tmp_path, 2))), "ann", tmp_path / "l.jsonl")
    server, address = label_server(labeling, 0)
    server.server_port = 80  # only this number is compared with the header
    with server:
        threading.Thread(target=server.handle_request).start()
        assert requests.get(address, headers={"Host": "127.0.0.1"}, timeout=10).status_code == 200


def test_labels_are_not_written_over_the_pairs(tmp_path: Path, capsys):
    pairs = write_pairs(tmp_path)
    assert feedback.main(["label", pairs, "--output", pairs]) == 1
    assert "is the file of the pairs" in capsys.readouterr().err
    assert feedback.main(["label", str(tmp_path / "none.jsonl")]) == 1
    assert "There is no file" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_does_not_exist_is_refused(port: str, tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        feedback.main(["label", write_pairs(tmp_path), "--port", port])
    assert f"argument --port: {port} must be between 0 and 65535" in capsys.readouterr().err


def test_messages_are_shown_with_their_roles(tmp_path: Path):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    row = {"prompt": messages, "first": "Hi", "second": "No", "label": ""}
    pairs = write_rows(tmp_path / "chat.jsonl", [row])
    labeling = Labeling(votes_of(read_pairs(pairs)), "ann", tmp_path / "labeled.jsonl")
    assert labeling.state()["pair"]["prompt"] == "system: Be kind.\n\nuser: Hello"
    labeling.label(0, "tie")
    assert read(tmp_path / "labeled.jsonl")[0]["prompt"] == messages
