"""What the parent tells a measuring process, and what that answers: lines of JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Side = Literal["ours", "trl"]
SIDES: tuple[Side, Side] = ("ours", "trl")
Precision = Literal["highest", "medium"]

READY = "ready"
"""What a process says when its models are loaded; the rest of its lines are JSON."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one process does: `updates` PPO steps, each when it is told to."""

    side: Side
    models: str
    """Folder of `models.save_models`."""

    updates: int = 1
    microbatch: int
    accumulation: int
    epochs: int
    response_length: int
    ends_early: bool
    precision: Precision = "highest"
    """`torch.set_float32_matmul_precision`; torch's default is highest."""

    bf16: bool = False
    best: bool = False
    """Our best setting in the place of the one that TRL is given too."""

    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 2

    @property
    def batch(self) -> int:
        """Episodes of one update."""
        return self.microbatch * self.accumulation

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of the prompts of each update."""
        rows: list[list[int]] = json.loads((Path(self.models) / "prompts.json").read_text())
        return rows

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Task":
        """What `to_json` gave."""
        return cls(**json.loads(line))


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one PPO step took."""

    seconds: float
    sampling: float
    scoring: float
    updating: float
    tokens: float
    """Mean tokens of a response, the stop token included."""

    in_bf16: bool
    """Whether it computed in bfloat16, as asked or chosen by itself."""

    peak_bytes: int
    """Most memory of the process so far: resident, or allocated on the GPU."""

    imports_bytes: int
    """Resident memory after the imports, before a model was loaded."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measured updates of one task, over all of its processes."""

    task: Task
    updates: Sequence[Update] = field(default_factory=list)

    def episodes_per_second(self, number: int) -> float:
        """Of one update."""
        return self.task.batch / self.updates[number].seconds

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a response."""
        return statistics.mean(update.tokens for update in self.updates)

    @property
    def peak_bytes(self) -> int:
        """Of the largest process."""
        return max(update.peak_bytes for update in self.updates)
