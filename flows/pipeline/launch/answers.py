"""Answer prompts with a policy, in this process or in one process per GPU."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.launch.commands import gpus
from pipeline.launch.launcher import train
from pipeline.settings.settings import Settings
from ppo_core.data.chat_template import Messages
from ppo_core.rollout.token_sampling import server_of
from ppo_core.training.answer_job import AnswerJob, read_answers, run_answer_job, write_answer_job
from ppo_core.training.answer_prompts import Answers

PROGRAM = ("ppo_core.training.answer_job",)

LEAST_PROMPTS = 16
"""Minimum number of prompts for each process. Answering fewer prompts takes less time than starting
a process."""


def answer_processes(asked: int, prompts: int) -> int:
    """Return the number of processes for answering `prompts` prompts.

    The number is one per GPU, but at most `asked` (0 for no limit), and so low that each process
    has at least LEAST_PROMPTS prompts. Without a GPU, one process uses all cores.
    """
    found = gpus()
    wanted = min(asked or found, found)
    return max(1, min(wanted, prompts // LEAST_PROMPTS))


def answer(job: AnswerJob, *, processes: int, folder: Path, stall_minutes: float) -> Answers:
    """Return the answers to all prompts of a job.

    Args:
        job: the policy, the prompts, and the decoding.
        processes: number of processes that share the prompts.
        folder: folder for the files of several processes; removed after use.
        stall_minutes: see `train`; not used with one process.

    Raises:
        ModelError: a model cannot be loaded, or has no stop token.
        ProcessError: a process died.
    """
    if processes == 1:
        return run_answer_job(job)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "answers.json"
    write_answer_job(job, file)
    train(file, processes=processes, program=PROGRAM, stall_minutes=stall_minutes)
    answers = read_answers(job, folder, processes)
    shutil.rmtree(folder)
    return answers


def answer_in_run(job: AnswerJob, settings: Settings, folder: Path) -> Answers:
    """Return the answers to all prompts of a job, with the processes that the settings allow.

    `folder` is the folder of the run.
    """
    return answer(
        job,
        # A vLLM server distributes the work over its GPUs by itself.
        processes=1 if job.server else answer_processes(settings.processes, len(job.prompts)),
        folder=folder / "answers",
        stall_minutes=settings.stall_minutes,
    )


def answer_as_ppo(
    settings: Settings,
    policy: str,
    folder: Path,
    prompts: Sequence[str | Messages],
    *,
    tokenizer: str = "",
) -> list[str]:
    """Sample an answer to each prompt with the sampling settings of PPO.

    `folder` is the folder of the run. `tokenizer` is the folder of the tokenizer; if it is empty,
    the tokenizer is in the folder `policy`.
    """
    job = job_of_ppo(settings, policy, prompts, tokenizer=tokenizer)
    return answer_in_run(job, settings, folder).texts


def inputs_of_samples(settings: Settings, digest: str) -> dict[str, Any]:
    """Return what decides the samples of a policy with this digest, apart from the prompts."""
    job = job_of_ppo(settings, digest, [])
    # The address of a vLLM server decides nothing, and the batch size changes samples by rounding.
    return asdict(replace(job, server=None, batch_size=0)) | {"vllm": job.server is not None}


def job_of_ppo(
    settings: Settings, policy: str, prompts: Sequence[str | Messages], *, tokenizer: str = ""
) -> AnswerJob:
    """Return the job that samples an answer to each prompt as PPO does, see `answer_as_ppo`."""
    return AnswerJob(
        policy=policy,
        tokenizer=tokenizer or policy,
        prompts=list(prompts),
        prompt_format=settings.prompt_format,
        response_length=settings.ppo.response_length,
        temperature=settings.ppo.temperature,
        top_k=settings.ppo.top_k,
        top_p=settings.ppo.top_p,
        stop=settings.ppo.stop_token,
        stop_token_id=settings.ppo.stop_token_id,
        seed=settings.seed,
        batch_size=settings.ppo.local_rollout_forward_batch_size,
        precision=settings.precision,
        server=server_of(settings.ppo),
    )
