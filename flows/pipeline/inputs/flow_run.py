"""Record that all steps of one run of the flow share."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeline.inputs.lineage import DataSet
from pipeline.storage.workspace import Workspace

SETTINGS_FILE = "settings.toml"
"""File with all settings of a run, in the folder of the run. A new run can use the file again."""

QUARANTINE = "quarantine"
"""Folder for the rows that were left out, in the folder of the run or, without a run, in
`output_dir`."""

PAGE = "Page of the run:"
"""Beginning of the lines that say where the page of a run is; a terminal shows them at once."""

PPO = "ppo"
"""Folder of PPO's files and checkpoints, in the folder of the run."""

REWARD_MODEL, CRITIC = "reward-model", "critic"
"""Subfolders with the models, in the folder of a `ChampionStart`."""


@dataclass(frozen=True, kw_only=True)
class ChampionStart:
    """Reward model and critic of the champion's run, from which a new run trains its own."""

    FILE_FIELDS: ClassVar = ("path",)

    version: int
    """Version number of the champion."""

    path: str
    """Path or address of the folder with both models and the digests of their rows."""

    digest: str
    """SHA-256 of the manifest of the folder."""


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """One run of the flow; a resumed run keeps the record of the original run."""

    id: str
    """Id FLOW/NUMBER. Each id has one parent run in MLflow and registers at most one version."""

    workspace: Workspace
    """Folder of the caches and of all runs, with an optional copy in S3."""

    tracking: dict[str, str]
    """MLflow run ids by step name; `parent` is the MLflow run of the full run."""

    origin: dict[str, str]
    """Lineage tags of the registered version, from `lineage.trace`."""

    data: list[DataSet]
    """The data sets that the run reads."""

    start: ChampionStart | None = None
    """Models from which reward model and critic start; None without `Settings.start_from`."""

    @property
    def folder(self) -> Path:
        """Folder of the policy, reports, samples, judgments and journal (entries for MLflow)."""
        return self.workspace.folder_of_run(self.id.rpartition("/")[2])

    def place_of(self, file: str) -> str:
        """Return `shown_path` of a file of the run; with a store, its name in MLflow."""
        return file if self.workspace.store else shown_path(self.folder / file)


def shown_path(path: Path) -> str:
    """Return a path, relative to the current folder if it is below that folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
