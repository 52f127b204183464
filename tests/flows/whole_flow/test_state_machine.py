"""Flows as Step Functions runs them: each step on a disk of its own, with S3 between them."""

from collections.abc import Iterator

import pytest

from tests.helpers.aws.state_machine import StateMachines, state_machines

THREE_STEPS = '''
"""Three steps; the second fails as often as the parameter says."""
import os
import sys
from pathlib import Path

from metaflow import FlowSpec, Parameter, current, retry, step

import ppo_core

ppo_core.METAFLOW_PACKAGE_POLICY = "include"


class Three(FlowSpec):
    failures = Parameter("failures", type=int, default=0)

    @step
    def start(self):
        self.text = "made by the first step"
        self.folder = Path.cwd()
        look_around()
        self.next(self.middle)

    @retry(times=1, minutes_between_retries=0)
    @step
    def middle(self):
        look_around()
        if current.retry_count < self.failures:
            (self.folder / "of this job").mkdir(parents=True)
            sys.exit("the middle fails")
        self.text += ", continued by the second"
        self.next(self.end)

    @step
    def end(self):
        look_around()
        print("text:", self.text)


def look_around():
    """Print what this job found in its folders, and leave a file in each for a next one."""
    here = Path.cwd()
    folders = [here.parent, Path.home(), Path(os.environ["TMPDIR"])]
    print("left by another:", sum((folder / "mark").exists() for folder in folders))
    for folder in folders:
        (folder / "mark").touch()
    print("code of this job:", Path(ppo_core.__file__).is_relative_to(here))
    print("working folder:", here)
    print("variable:", os.environ.get("CHOSEN"), os.environ.get("NOT_CHOSEN"))


if __name__ == "__main__":
    Three()
'''


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines() -> Iterator[StateMachines]:
    with pytest.MonkeyPatch.context() as here, state_machines({"CHOSEN": "by the test"}) as made:
        here.setenv("NOT_CHOSEN", "a variable of this process")
        yield made


@pytest.fixture(scope="module")
def deployed(machines: StateMachines, tmp_path_factory: pytest.TempPathFactory) -> str:
    flow = tmp_path_factory.mktemp("flow") / "three.py"
    flow.write_text(THREE_STEPS)
    return machines.create(flow)


def said(log: str, beginning: str) -> str:
    """Return the rest of the line that begins so."""
    return next(line for line in log.splitlines() if line.startswith(beginning))[len(beginning) :]


def test_steps_share_artifacts_and_no_folder(machines: StateMachines, deployed: str):
    ended = machines.start(deployed)
    assert ended.status == "SUCCEEDED", ended.jobs[-1].log
    assert [(one.step, one.attempt) for one in ended.jobs] == [
        ("start", 1),
        ("middle", 1),
        ("end", 1),
    ]
    assert "text: made by the first step, continued by the second" in ended.jobs[-1].log
    assert len({one.folder for one in ended.jobs}) == 3
    for one in ended.jobs:
        assert not one.folder.exists()
        assert said(one.log, "working folder: ") == str(one.folder / "work" / "metaflow")
        assert said(one.log, "left by another: ") == "0"
        assert said(one.log, "code of this job: ") == "True"
        assert said(one.log, "variable: ") == "by the test None"


def test_a_failed_attempt_is_repeated_in_a_new_folder(machines: StateMachines, deployed: str):
    ended = machines.start(deployed, {"failures": 1})
    assert ended.status == "SUCCEEDED", ended.jobs[-1].log
    assert [(one.step, one.attempt, one.exit_code) for one in ended.jobs] == [
        ("start", 1, 0),
        ("middle", 1, 1),
        ("middle", 2, 0),
        ("end", 1, 0),
    ]
    first, second = ended.jobs[1:3]
    assert "the middle fails" in first.log
    assert first.folder != second.folder
    assert said(second.log, "left by another: ") == "0"
    # The path of the first job's folder is an artifact, and the failed attempt wrote there.
    assert first.revisited == [ended.jobs[0].folder]
    assert second.revisited == []
    assert not any(one.folder.exists() for one in ended.jobs)


def test_a_step_that_always_fails_ends_the_execution(machines: StateMachines, deployed: str):
    ended = machines.start(deployed, {"failures": 2})
    assert ended.status == "FAILED"
    # A folder that the first attempt made is not there for the second, which would end otherwise.
    assert "the middle fails" in ended.jobs[-1].log
    assert [(one.step, one.attempt, one.exit_code) for one in ended.jobs] == [
        ("start", 1, 0),
        ("middle", 1, 1),
        ("middle", 2, 1),
    ]
    assert not any(one.folder.exists() for one in ended.jobs)
