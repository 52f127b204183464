"""Parts of both measuring processes: pace, clock, and a line of JSON per update.

TRL's environment imports this file, so it needs torch and transformers alone.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import psutil
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from tests.benchmarks.tasks import READY, Task, Update


def own_stdout() -> TextIO:
    """Return the channel to the parent; redirect everything printed later to stderr."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return psutil.Process().memory_info().rss


def peak_bytes(device: str) -> int:
    """Return the peak memory of this process: resident, or allocated on the GPU.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def load(task: Task, part: str) -> PreTrainedModel:
    """Load the policy (also the reference), critic or reward model, in fp32."""
    kind = AutoModelForCausalLM if part == "policy" else AutoModelForSequenceClassification
    return kind.from_pretrained(f"{task.models}/{part}", dtype=torch.float32).to(task.device)


def load_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """Load the tokenizer of all models."""
    return AutoTokenizer.from_pretrained(f"{task.models}/tokenizer")


class Pace(TrainerCallback):
    """Runs an update for each line on stdin, and prints a line with its measurements.

    Both trainers log once at the end of an update, so two processes alternate by update.
    """

    def __init__(self, task: Task, channel: TextIO, imports_bytes: int) -> None:
        self.task = task
        self.channel = channel
        self.imports_bytes = imports_bytes
        self.describe: Callable[[dict[str, float]], dict[str, float]]
        """Seconds of the phases and tokens, from what was logged."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        print(READY, file=self.channel, flush=True)
        self._await_turn()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **details: Any
    ) -> None:
        seconds = self.now() - self.started
        update = Update(
            seconds=seconds,
            **self.describe(logs),
            in_bf16=bool(args.bf16),
            peak_bytes=peak_bytes(self.task.device),
            imports_bytes=self.imports_bytes,
        )
        print(json.dumps(asdict(update)), file=self.channel, flush=True)
        # After the last update too: a process that exits would disturb the other's update.
        self._await_turn()

    def now(self) -> float:
        """Return the clock in seconds, after pending GPU work."""
        if self.task.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _await_turn(self) -> None:
        if not sys.stdin.readline():
            sys.exit("The parent has gone.")
        self.started = self.now()


def begin() -> Pace:
    """Read the task from the command line, and set the threads."""
    imports_bytes = resident_bytes()
    channel = own_stdout()
    task = Task.from_json(sys.argv[1])
    torch.set_num_threads(task.threads)
    return Pace(task, channel, imports_bytes)
