"""Answer prompts with a policy from files, in one process or in several that split the prompts.

Each process of `python -m ppo_core.training.answer_job JOB.json` writes its answers into the folder
of the job file.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from ppo_core.config.placement import Precision, placement_for_reading
from ppo_core.config.row_settings import PromptFormat
from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.dialogues import in_format_of
from ppo_core.distributed.process import prepare_command, reported_errors
from ppo_core.errors import PPOError
from ppo_core.errors.out_of_memory import free_unused
from ppo_core.io.atomic_files import write_atomically
from ppo_core.io.progress_bar import ProgressFile, listening
from ppo_core.io.validation import read_record
from ppo_core.models.loading import load_policy, load_tokenizer
from ppo_core.rollout.token_sampling import ServerSettings, own_stop_token
from ppo_core.training.answer_prompts import Answers, answer_prompts


@dataclass(frozen=True, kw_only=True)
class AnswerJob:
    """Prompts, and how a policy answers them."""

    policy: str
    """Folder or hub id of the policy."""

    tokenizer: str
    """Folder or hub id of the policy's tokenizer."""

    prompts: list[str | Messages]
    """Prompts, as texts or messages."""

    prompt_format: PromptFormat
    """How the policy reads prompts; see `set_prompt_format`."""

    response_length: int
    """Maximum number of tokens of an answer."""

    temperature: float
    """Sampling temperature; 0 decodes greedily."""

    top_k: int = 0
    """Sample from this number of likeliest tokens; 0 samples from all tokens."""

    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability."""

    stop: Literal["eos", "own"] | None = "eos"
    """`eos` or None, as in `PPOConfig.stop_token`; or `own`, the stop token in the policy's files,
    which also ends responses when the policy is served. If the files have no stop token, each
    response has the full length."""

    stop_token_id: int | None = None
    """Id of the stop token, used instead of `stop`; ignored if `stop` is `own`."""

    seed: int
    """Seed of the random numbers."""

    batch_size: int = 64
    """Number of prompts in a generation batch; fewer if memory is full."""

    precision: Precision = "auto"
    """Precision of the policy."""

    reference: str | None = None
    """Folder or hub id of the reference of the KL divergence; None: no divergence is measured."""

    reference_temperature: float | None = None
    """Temperature of the reference, for the divergence of greedy answers. None: the divergence of
    greedy answers is not measured."""

    server: ServerSettings | None = None
    """vLLM server that samples with the policy's weights, only for a job of one process. None: the
    process itself samples."""


def run_answer_job(job: AnswerJob, *, rank: int = 0, processes: int = 1) -> Answers:
    """Answer the prompts at the indices rank, rank + processes, ...; return the answers.

    The number of processes changes an answer only by rounding, which depends on the batch.

    Raises:
        ModelError: a model cannot be loaded; see also `answer_prompts`.
        TrainingError: see `answer_prompts`.
    """
    placement = placement_for_reading(job.precision)
    model = load_policy(job.policy, placement=placement)

    def load_reference() -> PreTrainedModel:
        assert job.reference is not None
        if job.reference == job.policy:
            return model
        # The memory of a GPU may be too small for both models.
        model.cpu()
        free_unused()
        return load_policy(job.reference, placement=placement)

    tokenizer = load_tokenizer(job.tokenizer, job.prompt_format)
    is_own = job.stop == "own"
    return answer_prompts(
        model,
        tokenizer,
        [in_format_of(tokenizer, prompt) for prompt in job.prompts],
        numbers=range(rank, len(job.prompts), processes),
        response_length=job.response_length,
        temperature=job.temperature,
        top_k=job.top_k,
        top_p=job.top_p,
        stop=None if is_own else job.stop,
        stop_token_id=own_stop_token(model, tokenizer) if is_own else job.stop_token_id,
        seed=job.seed,
        batch_size=job.batch_size,
        load_reference=None if job.reference is None else load_reference,
        reference_temperature=job.reference_temperature,
        server=job.server,
    )


def write_answer_job(job: AnswerJob, file: Path) -> None:
    """Write a job for the processes of `python -m ppo_core.training.answer_job`.

    Raises:
        TrainingError: the file cannot be written.
    """
    write_atomically(file, json.dumps(asdict(job)))


def read_answers(job: AnswerJob, folder: Path, processes: int) -> Answers:
    """Join the answers that the processes wrote in the folder of their job."""
    texts, divergences = [""] * len(job.prompts), []
    stopped: list[bool] | None = [False] * len(job.prompts)
    for rank in range(processes):
        part = Answers(**json.loads(_file_of(folder, rank).read_text(encoding="utf-8")))
        texts[rank::processes] = part.texts
        if stopped is None or part.stopped is None:
            stopped = None
        else:
            stopped[rank::processes] = part.stopped
        if part.kl is not None:
            divergences.append(part.kl * len(part.texts))
    kl = sum(divergences) / len(texts) if divergences else None
    return Answers(texts=texts, kl=kl, stopped=stopped)


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"answers-{rank}.json"


def main(file: Path) -> int:
    """Answer the prompts of this process and return 0, or print an error and return 1."""
    rank, processes = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    try:
        with reported_errors():
            job = read_record(json.loads(file.read_text(encoding="utf-8")), AnswerJob)
            with listening(ProgressFile(file.parent)):
                answers = run_answer_job(job, rank=rank, processes=processes)
            write_atomically(_file_of(file.parent, rank), json.dumps(asdict(answers)))
    except PPOError as error:
        print(f"answers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    prepare_command()
    sys.exit(main(Path(sys.argv[1])))
