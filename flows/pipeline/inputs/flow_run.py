"""What all steps of one run of the flow share."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.inputs.lineage import DataSet

SETTINGS_FILE = "settings.toml"
"""In the folder of a run: what repeats it."""

SAMPLES, JUDGEMENTS = "samples.jsonl", "judgements.jsonl"
"""There too: every prompt with all answers, and every verdict."""


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """One run of the flow, the same one after it was resumed."""

    id: str
    """Of Metaflow, FLOW/NUMBER: it has one parent run in MLflow and registers one version."""

    folder: Path
    """Where it writes: the journal, the policy, the answers and their judgements."""

    tracking: dict[str, str]
    """Runs of MLflow by the names of the steps, and `parent`."""

    origin: dict[str, str]
    """Where it comes from, as `lineage.trace` has it: tags of its version."""

    data: list[DataSet]
    """The data sets that it reads."""
