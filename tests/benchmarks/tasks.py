"""Messages between the parent and a measuring process: lines of JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Side = Literal["ours", "trl"]

READY = "ready"
"""Line of a process that has loaded its models; later lines are JSON."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of one process: `updates` PPO steps, each at the parent's command."""

    side: Side
    models: str
    """Folder of `models.save_models`."""

    updates: int = 1
    microbatch: int
    accumulation: int
    epochs: int
    response_length: int
    ends_early: bool
    bf16: bool | None = None
    """Whether the passes compute in bfloat16; None for the default of the side."""

    estimator: str = "gae"
    """Our `advantage_estimator`."""

    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 2

    @property
    def batch(self) -> int:
        """Episodes in one update."""
        return self.microbatch * self.accumulation

    @property
    def prompts(self) -> list[list[int]]:
        """Return token ids of the prompts of every update."""
        rows: list[list[int]] = json.loads((Path(self.models) / "prompts.json").read_text())
        return rows

    def to_json(self) -> str:
        """Return the task as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Task":
        """Read the output of `to_json`."""
        return cls(**json.loads(line))


@dataclass(frozen=True, kw_only=True)
class Update:
    """Time and memory of one PPO step."""

    seconds: float
    sampling: float
    scoring: float
    updating: float
    tokens: float
    """Mean tokens of a response, the stop token included."""

    in_bf16: bool
    """Whether the step computed in bfloat16, set or chosen by the trainer."""

    peak_bytes: int
    """Peak memory of the process: resident, or allocated on the GPU."""

    imports_bytes: int
    """Resident memory after the imports, before a model was loaded."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measured updates of one task, of all its processes."""

    task: Task
    updates: Sequence[Update] = field(default_factory=list)

    def episodes_per_second(self, number: int) -> float:
        """Return episodes per second of one update."""
        return self.task.batch / self.updates[number].seconds

    @property
    def mean_tokens(self) -> float:
        """Return mean tokens per response."""
        return statistics.mean(update.tokens for update in self.updates)

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of the largest process."""
        return max(update.peak_bytes for update in self.updates)

    @property
    def bytes_above_imports(self) -> int:
        """Return the peak memory above the memory after the imports."""
        return self.peak_bytes - self.updates[0].imports_bytes
