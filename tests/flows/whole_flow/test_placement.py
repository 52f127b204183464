"""Every step that only reads models puts model and inputs where `placement_for_reading` says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.helpers.inputs.pipeline_inputs import write_model
from tests.helpers.models.chat import WORD, write_parrot
from tests.helpers.models.tiny import EOS, make_policy, make_tokenizer
from tests.helpers.runs.forked_python import run_python
from tests.helpers.runs.served_versions import register, write_version
from tests.helpers.servers.mlflow_store import tracking_to, write_database

PLACES = (
    "validation",
    "trained_judge",
    "answers",
    "chat_judge",
    "reward_judge",
    "win_rate",
    "service",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each step computed, and on which devices: see `tests.helpers.jobs.placement_job`."""
    return run_places(tmp_path_factory.mktemp("placement"), "other")


def run_places(folder: Path, device: str) -> dict[str, Any]:
    """The result of each step on the CPU and on a device, with the devices of its models."""
    write_model(folder / "rm", labels=1)
    make_policy(seed=5).save_pretrained(folder / "other-policy")
    make_tokenizer().save_pretrained(folder / "other-policy")
    write_parrot(folder / "chat", [55, WORD, EOS])
    database = write_database(folder / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch, tracking_to(database):
        patch.chdir(folder)  # artifacts will be here
        register(MlflowClient(), write_version(folder / "version"))
    ended = run_python(
        "-m", "tests.helpers.jobs.placement_job", folder, database, device, folder=folder
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("place", PLACES)
def test_model_and_inputs_are_on_the_device(place: str, found: dict[str, Any]):
    assert found[place]["cpu"][0] == ["cpu"]
    assert found[place]["other"][0] == ["other"]


@pytest.mark.parametrize("place", PLACES)
def test_the_device_changes_no_result(place: str, found: dict[str, Any]):
    require_equal(*(found[place][device][1] for device in ("cpu", "other")))


def require_equal(on_cpu: Any, on_other: Any) -> None:
    """Compare the results of a step on two devices, whose kernels round differently."""
    expected, got = dict(leaves(on_cpu)), dict(leaves(on_other))
    assert got.keys() == expected.keys()
    different = {
        name: (value, got[name])
        for name, value in expected.items()
        if got[name]
        != (pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value)
    }
    assert not different


def leaves(result: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each number and text of a result, with its path.

    The name of a group ends with a rounded bound (`quarter 1 of ..., up to 0.0264`), which the path
    leaves out: the last digit can differ between devices.
    """
    if isinstance(result, dict | list):
        inner = result.items() if isinstance(result, dict) else enumerate(result)
        for name, value in inner:
            yield from leaves(value, f"{path}/{str(name).split(', up to')[0]}")
    else:
        yield path, result
