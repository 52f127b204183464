"""The identity of one run of the flow, which all its steps share."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.inputs.lineage import DataSet

SETTINGS_FILE = "settings.toml"
"""File in the folder of a run: settings that repeat the run."""


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """One run of the flow; a resumed run keeps its record."""

    id: str
    """FLOW/NUMBER. One id has one parent run in MLflow and registers one version."""

    folder: Path
    """Folder of the journal, the policy, the reports, the samples and the judgements."""

    tracking: dict[str, str]
    """MLflow run ids by step name, and that of the whole run as `parent`."""

    origin: dict[str, str]
    """Lineage as `lineage.trace` returns it: tags of the registered version."""

    data: list[DataSet]
    """The data sets that the run reads."""
