"""What the stages of the flow hand on: paths and small numbers.

Metaflow pickles these records between steps, so this module imports nothing large. The reports
are JSON files; `ValidatedReward.report` and `EvaluatedPolicy.report` read them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.data.atomic_files import write_atomically

if TYPE_CHECKING:
    from pipeline.registry.decisions import Decision

SAMPLES, JUDGEMENTS = "samples.jsonl", "judgements.jsonl"
"""Files in the folder of an evaluation: all answers to each prompt, and all verdicts."""

Report = Mapping[str, Any]
"""What was measured, as JSON holds it: of a reward model, an evaluation, or a part of one."""

EVALUATION_FILE, REWARD_REPORT_FILE = "evaluation.json", "reward-model.json"
"""Reports in the folder of an evaluation, and in the folder of a run."""


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A policy or a reward model that is ready for PPO."""

    path: str
    """Folder or hub id."""

    metrics: dict[str, float]
    """Final metrics of its training; empty if this flow did not train it."""


@dataclass(frozen=True, kw_only=True)
class FetchedChampion:
    """The version in production, downloaded and verified."""

    version: int
    model: str
    """Folder or hub id of the model."""
    tokenizer: str
    """Folder or hub id of its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class ValidatedReward:
    """The verdict on a reward model, and how PPO scales its scores."""

    fit: bool
    """Whether it passed the gate."""

    accepted_by_hand: bool
    """Whether it failed the gate and a person accepted it."""

    reasons: list[str]
    """Why it failed the gate; empty if it passed."""

    bias: float
    """PPO's reward is gain * (score - bias)."""

    gain: float
    """See `bias`."""

    report_file: str
    """JSON file of everything that was measured."""

    def report(self) -> dict[str, Any]:
        """Read everything that was measured."""
        return _read(Path(self.report_file))


@dataclass(frozen=True, kw_only=True)
class Change:
    """A metric of PPO in its first and its last update."""

    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """The policy after PPO."""

    path: str
    """Folder of the policy."""

    objective: dict[str, Change]
    """PPO's metrics by their names."""

    episodes_per_second: float
    """Speed at the last update."""

    peak_rss_bytes: int
    """Largest resident memory of any process of the training."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedPolicy:
    """An evaluation of the trained policy, in a folder of its own."""

    champion: int | None
    """Version that the policy was compared with; None if there was no champion."""

    kl: float | None
    """KL divergence from the SFT policy, nats per answer; None if decoding does not allow one."""

    folder: str
    """Folder of the report, the samples and the judgements."""

    @property
    def samples(self) -> Path:
        """File of the prompts with all answers."""
        return Path(self.folder) / SAMPLES

    @property
    def judgements(self) -> Path:
        """File of all verdicts."""
        return Path(self.folder) / JUDGEMENTS

    def report(self) -> dict[str, Any]:
        """Read everything that was measured, with the paths of the samples and judgements."""
        measured = _read(Path(self.folder) / EVALUATION_FILE)
        return measured | {"samples": str(self.samples), "judgements": str(self.judgements)}


@dataclass(frozen=True, kw_only=True)
class RegisteredPolicy:
    """The policy as a version of the registered model, and the decision on it."""

    model: dict[str, str]
    """Name, version, URI, run id and manifest digest, as `register_version` returns them."""

    promotion: "Decision"
    """Whether it became the champion, and why."""

    evaluation: EvaluatedPolicy
    """The evaluation that the decision rests on."""

    kl: float
    """KL divergence from the SFT policy that the decision used, nats per answer."""


def write_report(path: Path, report: Report) -> None:
    """Write a report as JSON."""
    write_atomically(path, json.dumps(report))


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report
