"""AWS takes a spot instance in each phase of a training: saved, copied in time, and continued."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from tests.helpers.aws.spot_machine import UPDATES
from tests.helpers.inputs.pipeline_inputs import write_ppo_inputs
from tests.helpers.paths import ROOT
from tests.helpers.servers.servers import s3

SECONDS_TO_LEAVE = 110.0
"""AWS takes the machine two minutes after its notice."""

PHASES = {"rollout": "ppo", "update": "ppo", "save": "ppo", "SFT": "sft"}
"""Phase in which the notice comes -> training."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    with s3() as environment:
        yield environment


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_ppo_inputs(tmp_path_factory.mktemp("inputs"))


class Machine:
    """A machine of a scheduler, with a folder of its own."""

    def __init__(self, root: Path, training: str) -> None:
        self.root, self.training = root, training
        self.log = ""

    def train(
        self, inputs: dict[str, str], store: dict[str, str], *, prefix: str = "", phase: str = ""
    ) -> int:
        """Train until the process ends; return its exit code."""
        given = [self.training, str(self.root), json.dumps(inputs), prefix, phase]
        ran = subprocess.run(
            [sys.executable, "-m", "tests.helpers.aws.spot_machine", *given],
            cwd=ROOT,
            env=os.environ
            | store
            | {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'flows'}",
                "METAFLOW_RUNTIME_ENVIRONMENT": "kubernetes",
            },
            capture_output=True,
            text=True,
        )
        self.log = ran.stdout + ran.stderr
        return ran.returncode

    def result(self) -> tuple[bytes, list[int]]:
        """The weights of the trained model, and the updates or steps in its metrics."""
        lines = read_metrics(self.root / self.training / METRICS_FILE)
        weights = (self.root / "model" / "model.safetensors").read_bytes()
        return weights, [line["update"] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(
    inputs: dict[str, str], store: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[bytes, list[int]]]:
    """The results of trainings that nothing happens to, and that copy nothing."""
    results = {}
    for training in ("ppo", "sft"):
        machine = Machine(tmp_path_factory.mktemp(training), training)
        assert machine.train(inputs, store) == 0, machine.log
        results[training] = machine.result()
    return results


@pytest.mark.parametrize("phase", PHASES)
def test_a_machine_leaves_in_time_and_another_ends_its_work(
    phase: str,
    inputs: dict[str, str],
    store: dict[str, str],
    undisturbed: dict[str, tuple[bytes, list[int]]],
    tmp_path: Path,
):
    taken, new = (Machine(tmp_path / name, PHASES[phase]) for name in ("taken", "new"))
    assert taken.train(inputs, store, prefix=f"spot-{phase}", phase=phase) != 0
    seconds = time.time() - (tmp_path / "taken.notice").stat().st_mtime
    print(f"{phase}: ended {seconds:.1f} seconds after the notice")
    assert f"SIGTERM arrived during {phase}" in taken.log, taken.log
    assert "or after a notice of AWS" in taken.log, taken.log
    assert seconds < SECONDS_TO_LEAVE
    assert not list((taken.root / "model").iterdir())
    shutil.rmtree(taken.root)
    assert new.train(inputs, store, prefix=f"spot-{phase}") == 0, new.log
    assert "The training continues from checkpoint-" in new.log
    assert new.result() == undisturbed[PHASES[phase]]
    assert new.result()[1] == [*range(1, UPDATES + 1)]
