"""Record of one run of the flow, which all steps share."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.inputs.lineage import DataSet
from pipeline.storage.workspace import Workspace

SETTINGS_FILE = "settings.toml"
"""Name of the settings file in the folder of a run; the settings repeat the run."""


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """One run of the flow; a resumed run keeps the record of the original run."""

    id: str
    """Id FLOW/NUMBER. Each id has one parent run in MLflow and registers one version."""

    workspace: Workspace
    """Where the files of the run are."""

    tracking: dict[str, str]
    """MLflow run ids by step name; `parent` is the MLflow run of the full run."""

    origin: dict[str, str]
    """Lineage tags of the registered version, from `lineage.trace`."""

    data: list[DataSet]
    """The data sets that the run reads."""

    @property
    def folder(self) -> Path:
        """Folder of the journal, the policy, the reports, the samples and the judgements."""
        return self.workspace.root / "runs" / self.id.rpartition("/")[2]
