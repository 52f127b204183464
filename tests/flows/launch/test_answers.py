"""Several processes share the prompts of a policy, and give the answers of one."""

from pathlib import Path

import pytest

from pipeline.launch import answers
from pipeline.launch.answers import PROGRAM, answer, answer_processes
from ppo_core.data.progress_bar import PROGRESS_FILE
from ppo_core.errors import ModelError
from ppo_core.training.answers import AnswerJob, write_answer_job
from tests.helpers.forked_python import run_python
from tests.helpers.pipeline_inputs import write_model
from tests.helpers.tiny import make_policy


def job_of(folder: Path, **changes: object) -> AnswerJob:
    policy = write_model(folder / "policy")
    make_policy(seed=5).save_pretrained(folder / "reference")
    settings = {
        "policy": policy,
        "tokenizer": policy,
        "prompts": [f"w{number} w{number % 7}" for number in range(11)],
        "prompt_format": "auto",
        "response_length": 6,
        "temperature": 1.0,
        "seed": 1,
        "batch_size": 4,
        "reference": str(folder / "reference"),
        **changes,
    }
    return AnswerJob(**settings)


def test_two_processes_answer_as_one(tmp_path):
    job, folder = job_of(tmp_path), tmp_path / "answers"
    one = answer(job, processes=1, folder=folder, stall_minutes=5)
    two = answer(job, processes=2, folder=folder, stall_minutes=5)
    assert two.texts == one.texts
    assert len(set(one.texts)) > 1
    assert two.kl == pytest.approx(one.kl, abs=1e-5)
    assert not folder.exists()


def test_an_error_of_a_process_is_raised_as_it_was(tmp_path):
    job = job_of(tmp_path, reference=str(tmp_path / "missing"))
    with pytest.raises(ModelError, match="missing"):
        answer(job, processes=2, folder=tmp_path / "answers", stall_minutes=5)


def test_the_launcher_sees_that_each_process_makes_progress(tmp_path):
    job = job_of(tmp_path)
    write_answer_job(job, tmp_path / "job.json")
    ended = run_python("-m", *PROGRAM, tmp_path / "job.json", processes=2)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / PROGRESS_FILE).read_text() == "answering\n"


@pytest.mark.parametrize(
    ("gpus", "asked", "prompts", "expected"),
    [(0, 0, 900, 1), (0, 2, 900, 1), (8, 0, 900, 8), (8, 2, 900, 2), (2, 4, 900, 2), (8, 0, 40, 2)],
)
def test_one_process_for_each_gpu(gpus, asked, prompts, expected, monkeypatch):
    monkeypatch.setattr(answers, "gpus", lambda: gpus)
    assert answer_processes(asked, prompts) == expected
