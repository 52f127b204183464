"""Runs that are killed at random, resumed, and killed again: they end as an undisturbed run."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import tomli_w

from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.paths import ROOT
from tests.helpers.runs.flow_runs import client_of

CASES, KILLS = 10, 5
"""Number of cases, and of the kills in each: of a run, and of its resumptions."""

NAME = "killed-policy"

DECIDED = ("number", "action", "version", "champion", "reasons")
"""Parts of a decision that do not tell the run and the time."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves for those who use its policy."""

    weights: str
    """Digest of the registered weights."""

    verdicts: str
    """Digest of all judgements."""

    decision: dict[str, Any]
    win_rates: dict[str, Any]
    versions: int


class Chain:
    """A run in a folder of its own, and its resumptions."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, list[Path]()
        folder.mkdir()
        table = tiny_table(folder) | {
            "registered_model": NAME,
            "accept_reward_model": True,
            "summary_json": "summary.json",
        }
        table["ppo"] |= {"total_episodes": 160, "save_steps": 2}
        for section in ("sft", "reward_model_training"):
            table[section] |= {"num_epochs": 8, "save_steps": 4}
        # Of the folder, so that all runs have equal settings.
        (folder / "tiny.toml").write_text(tomli_w.dumps(table).replace(f"{folder}/", ""))

    def start(self) -> psutil.Popen:
        """Run the flow, or resume it if Metaflow has begun a run."""
        begun = any(self.folder.glob(".metaflow/RLHF/latest_run"))
        words = ["resume"] if begun else ["--config", "settings", "tiny.toml", "run"]
        self.logs.append(self.folder / f"log-{len(self.logs)}")
        variables = {key: value for key, value in os.environ.items() if "MLFLOW" not in key}
        variables |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(self.folder),
        }
        with self.logs[-1].open("wb") as log:
            return psutil.Popen(
                [sys.executable, str(ROOT / "flows" / "rlhf.py"), *words],
                cwd=self.folder,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> None:
        """Run to the end."""
        assert self.start().wait() == 0, self.log()[-5000:]

    def log(self) -> str:
        return "".join(path.read_text() for path in self.logs)

    def finished(self) -> Counter[str]:
        """How often each step was finished by a task that did its work."""
        done: Counter[str] = Counter()
        for path in self.logs:
            log = path.read_text()
            begun = re.findall(r"^[\d:]{8} (\w+) \(pid", log, re.M)
            done.update(before for before, after in pairwise(begun) if before != after)
            done.update(begun[-1:] if "\nNext: " in log else ())
        return done

    def outcome(self) -> Outcome:
        client = client_of(self.folder)
        version = client.get_model_version(NAME, "1")
        (weights,) = self.folder.glob(
            f"mlruns/**/{version.source.rsplit('/')[-1]}/**/*.safetensors"
        )
        (verdicts,) = self.folder.glob("outputs/runs/*/evaluation/judgements.jsonl")
        summary = json.loads((self.folder / "summary.json").read_text())
        return Outcome(
            weights=digest(weights),
            verdicts=digest(verdicts),
            decision={
                k: v for k, v in summary["promotion"].items() if k not in ("by", "at", "key")
            },
            win_rates=summary["win_rate"],
            versions=len(client.search_model_versions(f"name='{NAME}'")),
        )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Undisturbed:
    outcome: Outcome
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    chain = Chain(tmp_path_factory.mktemp("runs") / "undisturbed")
    started = time.monotonic()
    chain.end()
    seconds = time.monotonic() - started
    assert set(chain.finished().values()) == {1}
    return Undisturbed(chain.outcome(), seconds)


def kill_one(scheduler: psutil.Popen, random: Random) -> str | None:
    """Kill the scheduler or one of the processes below it; return its command.

    Return None if the process that was chosen has just ended by itself.
    """
    try:
        victim = random.choice([scheduler, *scheduler.children(recursive=True)])
        command = " ".join(victim.cmdline()[:9])[-120:]
        victim.kill()
    except psutil.NoSuchProcess:
        return None
    return command


@pytest.mark.parametrize("seed", range(CASES))
def test_killed_runs_end_as_an_undisturbed_run(seed: int, undisturbed: Undisturbed, tmp_path: Path):
    random, killed, chains = Random(seed), list[str](), list[Chain]()
    while len(killed) < KILLS:
        # A chain may end before its next kill; then a new one begins.
        chains.append(Chain(tmp_path / f"chain-{len(chains)}"))
        while len(killed) < KILLS and run_until_killed(chains[-1], undisturbed, random, killed):
            pass
        chains[-1].end()
    print(f"seed {seed}: {len(chains)} chains, killed:\n  " + "\n  ".join(killed))
    for chain in chains:
        assert max(chain.finished().values()) == 1, chain.finished()
        assert chain.outcome() == undisturbed.outcome


def run_until_killed(
    chain: Chain, undisturbed: Undisturbed, random: Random, killed: list[str]
) -> bool:
    """Start or resume a chain and kill one of its processes; return whether it was killed."""
    scheduler = chain.start()
    # A resumption has less to do. With earlier moments most chains are killed several times.
    share = 0.7 if len(chain.logs) == 1 else 0.3
    until = time.monotonic() + random.uniform(1, share * undisturbed.seconds)
    while time.monotonic() < until and scheduler.poll() is None:
        time.sleep(0.05)
    if scheduler.poll() is not None:
        return False
    command = kill_one(scheduler, random)
    if command is None:
        assert scheduler.wait() == 0, chain.log()[-5000:]
        return False
    killed.append(command)
    # A task that was killed is tried again, and a killed scheduler leaves its tasks.
    if random.random() < 0.5:
        time.sleep(random.uniform(0, 3))
    if scheduler.poll() is None:
        scheduler.kill()
    scheduler.wait()
    return True
