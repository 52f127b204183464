"""Full memory: smaller batches where nothing is trained, and an error with advice elsewhere."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ppo_core.errors import ModelError, TrainingError, library_errors
from ppo_core.errors.out_of_memory import BatchSize, explained_out_of_memory
from ppo_core.models.reward_model import RewardModel
from ppo_core.training.answer_prompts import answer_prompts
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.helpers.runs.forked_python import run_python

OF_CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."

PROMPTS = [f"w{number} w{number + 1}" for number in range(9)]

LIMITED = """
import resource, torch
from ppo_core.errors.out_of_memory import BatchSize
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 600 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
# 64 MiB a row: 16 rows are more than the process may have, 8 rows are not.
sizes = []
def work(rows):
    sizes.append(rows)
    return torch.ones(rows, 2**24).sum().item()
print(BatchSize(16, "adding").run(work), sizes)
"""


def full_above(rows: int) -> Callable[[Any], None]:
    """A hook of a model that fails as a full GPU does, if a batch has more rows."""

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and len(ids) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return hook


@pytest.mark.skipif(sys.platform != "linux", reason="The limit is of Linux.")
def test_a_process_that_really_has_too_little_memory_halves_its_batch():
    ended = run_python("-c", LIMITED)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split(" ", 1) == [f"{8 * 2**24:.1f}", "[16, 8]\n"]
    assert ended.stderr.count("Adding: the memory was full, so the batch has 8 rows") == 1


def test_answers_in_smaller_batches_are_the_same(caplog):
    tokenizer = make_tokenizer()
    how: dict[str, Any] = {"response_length": 6, "temperature": 0.7, "seed": 1, "batch_size": 8}
    expected = answer_prompts(make_policy(), tokenizer, PROMPTS, **how, load_reference=make_policy)
    model = make_policy()
    model.model.embed_tokens.register_forward_pre_hook(full_above(3), with_kwargs=True)
    with caplog.at_level(logging.WARNING):
        answers = answer_prompts(model, tokenizer, PROMPTS, **how, load_reference=make_policy)
    assert answers.texts == expected.texts
    assert [record.message for record in caplog.records if "memory" in record.message] == [
        "Answering: the memory was full, so the batch has 4 rows from now on.",
        "Answering: the memory was full, so the batch has 2 rows from now on.",
    ]


def test_scores_in_smaller_batches_are_the_same(caplog):
    rewards = RewardModel(make_classifier(), make_tokenizer())
    expected = rewards.score_texts(PROMPTS, PROMPTS, 8)
    rewards.model.model.embed_tokens.register_forward_pre_hook(full_above(2), with_kwargs=True)
    for _ in range(2):  # the second call begins with the size of the first
        torch.testing.assert_close(rewards.score_texts(PROMPTS, PROMPTS, 8), expected)
    assert caplog.text.count("Scoring: the memory was full") == 2


def test_a_size_that_was_too_large_is_not_tried_again():
    sizes: list[int] = []

    def work(rows: int) -> int:
        sizes.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return rows

    batches = BatchSize(8, "answering")
    assert [batches.run(work), batches.run(work)] == [2, 2]
    assert sizes == [8, 4, 2, 2]


def test_memory_for_no_row_is_an_error_with_the_peak():
    def work(rows: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    words = r"^Scoring needs more memory than there is, even with a single row .*\(peak .* GiB"
    with pytest.raises(TrainingError, match=words):
        BatchSize(4, "scoring").run(work)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        OF_CPU,
    ],
)
def test_full_memory_is_recognized_by_its_message(message: str):
    def work(rows: int) -> int:
        if rows > 1:
            raise RuntimeError(message)
        return rows

    assert BatchSize(4, "scoring").run(work) == 1
    with pytest.raises(TrainingError, match="ran out of memory"), explained_out_of_memory("x"):
        raise RuntimeError(message)


def test_the_peak_is_that_of_the_memory_that_is_full(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    for message, place in (("CUDA error: out of memory", "on the GPU"), (OF_CPU, "of the machine")):
        with pytest.raises(TrainingError, match=place), explained_out_of_memory("x"):
            raise RuntimeError(message)


def test_full_memory_is_no_fault_of_a_file_or_model():
    reading = library_errors(ModelError, "The model cannot be run", "Use another model.")
    with pytest.raises(TrainingError, match=r"ran out of memory .* Use a GPU with more"), reading:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")


def test_another_error_passes():
    def work(rows: int) -> None:
        raise RuntimeError("The shapes differ.")

    with pytest.raises(RuntimeError, match=r"^The shapes differ\.$"):
        BatchSize(4, "scoring").run(work)
    with pytest.raises(RuntimeError, match=r"^The shapes differ\.$"), explained_out_of_memory("x"):
        work(1)


def test_a_training_without_memory_says_what_to_change():
    expected = r"ran out of memory \(peak .*\): CUDA.* Lower it\."
    with pytest.raises(TrainingError, match=expected), explained_out_of_memory("Lower it."):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
