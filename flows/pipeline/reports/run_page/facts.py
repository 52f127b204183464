"""The data of the page of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.inputs.flow_run import SETTINGS_FILE, FlowRun
from pipeline.reports.document import Section, ShownProgress
from pipeline.results.evaluation import Evaluation
from pipeline.results.reward_report import RewardReport
from pipeline.results.run_cost import RunCost
from pipeline.results.step_records import RegisteredPolicy, WatchedPrompt
from pipeline.settings.settings import Settings
from pipeline.tracking.journal import Journal
from pipeline.tracking.run_record import PARENT

EPISODE = "episode"
"""Metric that each update of PPO has, and no step of another training."""

Curves = Mapping[str, list[tuple[int, float]]]
"""Metric -> points (step, value)."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Data about a run; a part that the run has not reached is None or empty."""

    run: FlowRun

    settings: Settings

    curves: Curves
    """Curves of all trainings so far."""

    reward_model: RewardReport | None = None

    warnings: list[str] = field(default_factory=list)
    """Warnings of PPO, each with its update."""

    evaluation: Evaluation | None = None

    failure: str = ""
    """Step that failed, and its error; empty if no step has failed."""

    registered: RegisteredPolicy | None = None
    """The version, the decision, and the evaluation with its files on this machine."""

    cost: RunCost | None = None

    progress: ShownProgress | None = None
    """Progress of the current phase of a running step; None if it is unknown."""

    samples: Path | None = None
    """File with the newest samples of a running PPO, see `ppo_core.reporting.sample_table`."""

    watched: list[WatchedPrompt] = field(default_factory=list)
    """Training prompts with PPO's answers so far; empty if the run has not reached PPO."""

    since_champion: Section | None = None
    """Section with the changes since the run of the champion."""

    @property
    def is_reward_model_refused(self) -> bool:
        """Whether the run ended because of its reward model."""
        report = self.reward_model
        is_fit = not report or report.fit or report.accepted_by_hand
        return self.settings.uses_reward_model and not is_fit

    @property
    def is_running(self) -> bool:
        """Whether the run has no outcome yet."""
        return not self.has_outcome and not self.failure

    @property
    def has_outcome(self) -> bool:
        """Whether the run has decided. A failure is no outcome, because the run may be resumed."""
        return bool(self.registered) or self.is_reward_model_refused

    @property
    def settings_file(self) -> str:
        """Path of the settings file for repeating the run; with a store, its name in MLflow."""
        return self.run.place_of(SETTINGS_FILE)


def curves_of(run: FlowRun, journal: Journal) -> Curves:
    """Return the curves of all trainings so far."""
    return journal.curves(run.tracking[PARENT])
