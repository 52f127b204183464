"""What both measuring processes share: the pace, the clock, and the line of JSON an update gives.

The environment of TRL imports this too: it needs transformers and torch alone.
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
    """Where the parent listens. Whatever else is printed goes to stderr from now on."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def resident_bytes() -> int:
    """Memory of this process now."""
    return psutil.Process().memory_info().rss


def peak_bytes(device: str) -> int:
    """Most memory of this process so far: resident, or allocated on the GPU.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def load(task: Task, part: str) -> PreTrainedModel:
    """The policy (also the reference), critic or reward model, in fp32."""
    kind = AutoModelForCausalLM if part == "policy" else AutoModelForSequenceClassification
    return kind.from_pretrained(f"{task.models}/{part}", dtype=torch.float32).to(task.device)


def load_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """The tokenizer of all parts."""
    return AutoTokenizer.from_pretrained(f"{task.models}/tokenizer")


class Pace(TrainerCallback):
    """Runs an update when a line comes on stdin, and answers with a line about it.

    Both trainers log once an update, at its end. So two processes take turns, update by update.
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
        # After the last one too: a process that ends would disturb the turn of another.
        self._await_turn()

    def now(self) -> float:
        """Seconds, when all that was begun on a GPU is done."""
        if self.task.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _await_turn(self) -> None:
        if not sys.stdin.readline():
            sys.exit("The parent has gone.")
        self.started = self.now()


def begin() -> Pace:
    """Read the task from the command line and set the machine up as it says."""
    imports_bytes = resident_bytes()
    channel = own_stdout()
    task = Task.from_json(sys.argv[1])
    torch.set_num_threads(task.threads)
    torch.set_float32_matmul_precision(task.precision)
    return Pace(task, channel, imports_bytes)
