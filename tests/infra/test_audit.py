"""`make audit` fails for a known vulnerability, unless a reason stands in the list for a while."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from infra.locks.audit import FOLDER, read_ignored
from ppo_core.errors import ConfigError
from tests.helpers.paths import ROOT

KNOWN = "GHSA-0000-0000-0001"
TODAY = date(2026, 11, 25)
ENTRY = f'[[ignored]]\nid = "{KNOWN}"\nreason = "Not reached."\nexpires = {{}}\n'


class Service(BaseHTTPRequestHandler):
    """OSV's API, which knows one vulnerability of torch; it remembers what it was asked for."""

    asked: set[str]

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = question["package"]["name"]
        self.asked.add(f"{name}=={question['version']}")
        package = {"name": name, "ecosystem": "PyPI"}
        entry = {"id": KNOWN, "summary": "Made up.", "affected": [{"package": package}]}
        reply = json.dumps({"vulns": [entry]} if name == "torch" else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@contextmanager
def service() -> Iterator[tuple[str, set[str]]]:
    asked: set[str] = set()
    handler = type("Asked", (Service,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
        server.shutdown()


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    """A copy of the folder, with three of the locked packages."""
    shutil.copy(FOLDER / "audit.py", tmp_path)
    (tmp_path / "ignored.toml").touch()
    for name in ("dev.txt", "cuda.txt"):
        entries = (FOLDER / name).read_text().replace("\\\n", "\\").splitlines()
        chosen = [line for line in entries if line.startswith(("numpy==", "torch==", "pytest=="))]
        (tmp_path / name).write_text("\n".join(chosen).replace("\\", "\\\n") + "\n")
    return tmp_path


def audit(folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "audit.py"), "--osv-url", url, "--cache-dir", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_known_vulnerability_fails_until_it_is_ignored(locks: Path):
    with service() as (url, asked):
        found = audit(locks, url)
        assert (found.returncode, KNOWN in found.stdout) == (1, True), found.stderr
        entries = (locks / "dev.txt").read_text() + (locks / "cuda.txt").read_text()
        assert asked == {line.split()[0] for line in entries.splitlines() if "==" in line}
        (locks / "ignored.toml").write_text(ENTRY.format(datetime.now(UTC).date()))
        passed = audit(locks, url)
        assert (passed.returncode, KNOWN in passed.stdout) == (0, False), passed.stderr
        (locks / "ignored.toml").write_text(ENTRY.format("2026-01-01"))
        expired = audit(locks, url)
    assert expired.returncode == 1
    assert f"{KNOWN} expires on 2026-01-01" in expired.stderr


@pytest.mark.slow
def test_a_service_that_does_not_answer_is_no_clean_audit(locks: Path):
    assert audit(locks, "http://127.0.0.1:9/v1/query").returncode == 1


def test_the_ignored_vulnerabilities_have_reasons_that_still_count():
    read_ignored(FOLDER / "ignored.toml", datetime.now(UTC).date())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (ENTRY.format("2026-11-24"), "within 180 days"),
        (ENTRY.format("2027-05-25"), "within 180 days"),
        (ENTRY.format('"2026-12-01"'), "must have an id and a reason"),
        (ENTRY.format("2026-12-01").replace("Not reached.", ""), "must have an id and a reason"),
        (ENTRY.format("2026-12-01") + "until = 1", "must have an id and a reason"),
    ],
)
def test_an_entry_without_reason_or_in_time_is_refused(tmp_path: Path, text: str, what: str):
    (tmp_path / "ignored.toml").write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_ignored(tmp_path / "ignored.toml", TODAY)


def test_an_entry_counts_on_its_last_day_and_for_180_days(tmp_path: Path):
    file = tmp_path / "ignored.toml"
    file.write_text(ENTRY.format("2026-11-25") + ENTRY.format("2027-05-24"))
    dates = [one.expires for one in read_ignored(file, TODAY)]
    assert dates == [date(2026, 11, 25), date(2027, 5, 24)]
