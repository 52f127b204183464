"""An update between two of its optimizer steps, and how a checkpoint keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ppo_core.data.types import Experience, Rollout, TokenSums
from ppo_core.ppo.update import UpdateProgress
from ppo_core.reporting.metrics import Metrics

ORDER = "order"
"""Name of the order of the rows among the tensors; those of the rollout begin with ROLLOUT."""
ROLLOUT = "rollout."


@dataclass(kw_only=True)
class PendingUpdate:
    """A batch that was sampled and scored, and how far it was learned from."""

    experience: Experience | None
    """The whole batch, in every process; None where nothing can be learned from it."""

    metrics: Metrics
    """What is known of the update before it is learned from."""

    progress: UpdateProgress

    def as_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, and all else as JSON takes it; only of one with an experience."""
        experience = dict(vars(self.experience))
        rollout = vars(experience.pop("rollout"))
        values = experience | {f"{ROLLOUT}{name}": value for name, value in rollout.items()}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return tensors | {ORDER: self.progress.order}, {
            "values": {name: value for name, value in values.items() if name not in tensors},
            "metrics": self.metrics,
            "steps_done": self.progress.steps_done,
            "sums": vars(self.progress.sums),
        }

    @classmethod
    def from_checkpoint(
        cls, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> "PendingUpdate":
        """Go on where `as_checkpoint` was called; the tensors stay where they are."""
        values: dict[str, Any] = {**tensors, **state["values"]}
        order = values.pop(ORDER)
        of_rollout = {
            name.removeprefix(ROLLOUT): value
            for name, value in values.items()
            if name.startswith(ROLLOUT)
        }
        own = {name: value for name, value in values.items() if not name.startswith(ROLLOUT)}
        return cls(
            experience=Experience(rollout=Rollout(**of_rollout), **own),
            metrics=dict(state["metrics"]),
            progress=UpdateProgress(
                order=order,
                steps_done=state["steps_done"],
                sums=TokenSums(**state["sums"]),
            ),
        )
