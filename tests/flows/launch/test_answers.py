"""Answers of a policy: by several processes as by one, and by a vLLM server."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.launch import answers
from pipeline.launch.answers import PROGRAM, answer, answer_as_ppo, answer_processes
from pipeline.settings.make_settings import make_settings
from ppo_core.errors import ModelError, TrainingError
from ppo_core.io.progress_bar import PROGRESS_FILE
from ppo_core.models.loading import is_same_architecture
from ppo_core.rollout.token_sampling import ServerSettings
from ppo_core.training.answer_job import AnswerJob, run_answer_job, write_answer_job
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model
from tests.helpers.models.tiny import make_policy
from tests.helpers.runs.forked_python import run_python
from tests.helpers.servers.vllm_server import VLLMServerOfTests, vllm_server


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


@pytest.mark.slow
def test_two_processes_answer_as_one(tmp_path):
    job, folder = job_of(tmp_path), tmp_path / "answers"
    one = answer(job, processes=1, folder=folder, stall_minutes=5)
    two = answer(job, processes=2, folder=folder, stall_minutes=5)
    assert two.texts == one.texts
    assert two.stopped == one.stopped
    assert set(one.stopped) == {True, False}
    assert len(set(one.texts)) > 1
    assert two.kl == pytest.approx(one.kl, abs=1e-5)
    assert not folder.exists()


@pytest.mark.slow
def test_samples_are_cut_as_ppo_cuts_them(tmp_path):
    table = tiny_table(tmp_path)
    table["ppo"] |= {"top_k": 1, "kl_estimator": "k3"}
    settings = make_settings(table | {"processes": 1}, {})
    prompts = [f"w{number}" for number in range(11)]
    sampled = answer_as_ppo(settings, settings.policy, tmp_path, prompts)
    length = settings.ppo.response_length
    greedy = AnswerJob(
        policy=settings.policy,
        tokenizer=settings.policy,
        prompts=prompts,
        prompt_format="auto",
        response_length=length,
        temperature=0.0,
        seed=1,
    )
    assert sampled == run_answer_job(greedy).texts


# --- Answers of a vLLM server --------------------------------------------------


def server_settings(server: VLLMServerOfTests, folder: Path) -> ServerSettings:
    return ServerSettings(
        url=server.url, weights_dir=str(folder / "weights"), timeout=2.0, at_once=4
    )


@pytest.fixture
def server() -> Iterator[VLLMServerOfTests]:
    """One that starts with other weights than the policy's."""
    with vllm_server(make_policy(seed=7)) as server:
        yield server


def test_a_server_gives_the_greedy_answers_of_the_policy(tmp_path, server):
    job = job_of(tmp_path, temperature=0.0)
    here = run_answer_job(job)
    there = run_answer_job(replace(job, server=server_settings(server, tmp_path)))
    assert there == here
    assert len(set(there.texts)) > 1
    # 8 responses of the check, and the answers
    assert len(server.completions) - 1 == 8 + len(job.prompts)


@pytest.mark.slow
def test_the_divergence_of_a_servers_answers_is_the_policys(tmp_path, server):
    job = job_of(tmp_path, prompts=[f"w{n % 9} w{n % 7}" for n in range(300)])
    here = run_answer_job(job)
    there = run_answer_job(replace(job, server=server_settings(server, tmp_path)))
    assert there.texts != here.texts
    # Both are means over 300 samples, and exact at each token.
    assert there.kl == pytest.approx(here.kl, rel=0.1)
    assert here.kl > 0.1


def test_a_server_with_other_weights_is_refused(tmp_path, server):
    server.keeps_its_head = True
    job = job_of(tmp_path, server=server_settings(server, tmp_path))
    with pytest.raises(TrainingError, match=r"KL divergence between the vLLM server at .* nats"):
        run_answer_job(job)
    assert len(server.completions) == 1 + 8


def test_only_models_that_compute_alike_are_of_the_same_architecture(tmp_path):
    one = write_model(tmp_path / "one")
    make_policy(seed=5).save_pretrained(tmp_path / "again")
    policy = make_policy()
    policy.config.rope_parameters["rope_theta"] *= 2
    policy.save_pretrained(tmp_path / "other")
    assert is_same_architecture(one, tmp_path / "again")
    assert not is_same_architecture(one, tmp_path / "other")


# --- Several processes ----------------------------------------------------------


@pytest.mark.slow
def test_an_error_of_a_process_is_raised_as_it_was(tmp_path):
    job = job_of(tmp_path, reference=str(tmp_path / "missing"))
    with pytest.raises(ModelError, match="missing"):
        answer(job, processes=2, folder=tmp_path / "answers", stall_minutes=5)


def test_the_launcher_sees_that_each_process_makes_progress(tmp_path):
    job = job_of(tmp_path)
    write_answer_job(job, tmp_path / "job.json")
    ended = run_python("-m", *PROGRAM, tmp_path / "job.json", processes=2)
    assert ended.returncode == 0, ended.stderr
    # The phase of the answers, or that of a pass within it.
    assert (tmp_path / PROGRESS_FILE).read_text() in ("answering\n", "scoring\n")


@pytest.mark.parametrize(
    ("gpus", "asked", "prompts", "expected"),
    [(0, 0, 900, 1), (0, 2, 900, 1), (8, 0, 900, 8), (8, 2, 900, 2), (2, 4, 900, 2), (8, 0, 40, 2)],
)
def test_one_process_for_each_gpu(gpus, asked, prompts, expected, monkeypatch):
    monkeypatch.setattr(answers, "gpus", lambda: gpus)
    assert answer_processes(asked, prompts) == expected
