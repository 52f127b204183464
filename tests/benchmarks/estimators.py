"""The cost of a PPO step without a critic, beside the same step with a critic."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.cases import NEOX_10M, Workload
from tests.benchmarks.compare import alternate, task_of
from tests.benchmarks.models import save_models
from tests.benchmarks.tasks import Run


@dataclass(frozen=True, kw_only=True)
class Estimators:
    """Runs of the same workload, update by update in turns."""

    with_critic: Run
    without: Run

    def seconds_ratio(self) -> float:
        """Return the median over the pairs of updates of the seconds without a critic to those with
        one."""
        pairs = zip(self.without.updates, self.with_critic.updates, strict=True)
        return statistics.median(ours.seconds / other.seconds for ours, other in pairs)

    def bytes_ratio(self) -> float:
        """Return the peak memory above the imports without a critic, to that with one."""
        return self.without.bytes_above_imports / self.with_critic.bytes_above_imports


def measure_estimators(folder: Path, *, rounds: int) -> Estimators:
    """Measure updates of the 10M model with gae and with reinforce, in turns."""
    workload = Workload(shape=NEOX_10M)
    save_models(workload, folder)
    tasks = [
        task_of(workload, folder, side="ours", estimator=estimator)
        for estimator in ("gae", "reinforce")
    ]
    with_critic, without = alternate(tasks, warmups=1, rounds=rounds)
    return Estimators(with_critic=with_critic, without=without)
