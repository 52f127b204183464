"""The job that describes the passes to time, and its result; both are files in one folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ppo_core.config.run_config import Sharding
from ppo_core.io.atomic_files import write_atomically
from ppo_core.io.validation import read_record

_JOB, _RESULT = "settings.json", "result.json"

WORKS = "works"
"""Metric with the number of all passes to time; each timed pass adds a line to the metrics file."""


@dataclass(frozen=True, kw_only=True)
class SpeedJob:
    """The shapes of the policy and of the batches for which passes are timed."""

    policy: str
    """Folder or hub id of the policy; its configuration is read, but not its weights."""

    depths: Sequence[int]
    """Number of layers of each model that is timed."""

    sharding: Sharding
    """How the processes share weights and optimizer states."""

    autocast: bool
    """Whether passes compute in bfloat16 (`bf16`)."""

    use_cpu: bool
    """Whether the processes compute on the CPU."""

    prompt_tokens: int
    """Tokens of each prompt."""

    response_tokens: int
    """Tokens of each response."""

    sampled_rows: int
    """Responses that a process samples at a time."""

    trained_rows: int
    """Responses in a forward and backward pass of a process."""


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Times of a policy with few layers; each is the time of the slowest process."""

    layers: int
    """Number of layers."""

    scoring: float
    """Seconds of a pass without gradients, divided by its tokens of prompts and responses."""

    updating: float
    """Seconds of a forward and backward pass, divided by its tokens of prompts and responses. The
    processes exchange nothing in this pass."""

    drawing: float
    """Seconds to sample one more token for every response of a batch."""

    gathering: float
    """Seconds of an all-gather of sharded weights (zero3, fsdp2), or of the weights after an
    optimizer step (zero1, zero2); 0 under ddp, or in one process."""

    exchange: float
    """Seconds that the exchange of weights and gradients adds to a forward and backward pass; 0 in
    one process."""


@dataclass(frozen=True, kw_only=True)
class FoundSpeed:
    """Times that the processes of a `SpeedJob` measured."""

    passes: Sequence[PassSeconds]
    """Times for each of `SpeedJob.depths`."""

    adam: float
    """Seconds of an optimizer step, divided by the number of parameters."""


def write_speed_job(job: SpeedJob, folder: Path) -> Path:
    """Write a job into a folder, and return the job's file."""
    file = folder / _JOB
    write_atomically(file, json.dumps(asdict(job), indent=2))
    return file


def read_speed_job(file: Path) -> SpeedJob:
    """Return the job in a file that `write_speed_job` has written."""
    return SpeedJob(**json.loads(file.read_text(encoding="utf-8")))


def write_speed(found: FoundSpeed, file: Path) -> None:
    """Write the result beside the file of its job."""
    write_atomically(file.parent / _RESULT, json.dumps(asdict(found), indent=2))


def read_speed(folder: Path) -> FoundSpeed:
    """Return the result of a job that has ended."""
    return read_record(json.loads((folder / _RESULT).read_text(encoding="utf-8")), FoundSpeed)
