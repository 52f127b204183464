"""The summary of a run."""

from dataclasses import dataclass
from typing import Any

from pipeline.registry.decisions import Decision
from pipeline.results.evaluation import Evaluation
from pipeline.results.reward_report import RewardReport
from pipeline.results.run_cost import RunCost
from pipeline.results.step_records import Change


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Time and memory of a run."""

    seconds: dict[str, float]
    """Durations by name of the step."""

    episodes_per_second: float
    """Throughput that the last update of PPO reported."""

    peak_rss_bytes: int
    """Peak resident memory of the largest process of PPO."""


@dataclass(frozen=True, kw_only=True)
class Summary(Evaluation):
    """Everything that a run measured and decided."""

    samples: str
    """Path or address of the file with the prompts and all answers."""

    judgements: str
    """Path or address of the file with all verdicts."""

    reward_model: RewardReport

    objective: dict[str, Change]
    """First and last values of PPO's metrics, by metric name."""

    warnings: list[str]
    """Faults of the training, see `TrainedPolicy`."""

    timings: Timings

    model: dict[str, str]
    """Name, version number, URI, run id and manifest digest of the registered version."""

    promotion: Decision

    settings: dict[str, Any]
    """Settings of the run, as nested tables."""

    cost: RunCost
