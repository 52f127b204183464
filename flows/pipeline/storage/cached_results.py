"""Make a result, such as a model, once for equal inputs; later runs on any machine reuse it."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.storage.workspace import Workspace
from ppo_core.io import folder_cache

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, kw_only=True)
class MadeModel:
    """A model in the cache of the workspace."""

    place: str
    """Path of the model's folder, or its address in S3."""

    digest: str
    """Digest of the model, as `model_digests.digest_of_model` returns it."""

    values: dict[str, Any]
    """Values that the training returned."""

    reused: bool
    """Whether an earlier training made the model."""

    @property
    def run(self) -> str:
        """Id of the run of the flow that made the model; empty if the values do not have it."""
        return str(self.values.get("run", ""))


def as_values(record: "DataclassInstance") -> dict[str, Any]:
    """Return a record as values for `make_or_reuse`, without the fields that are None."""
    return {name: value for name, value in asdict(record).items() if value is not None}


def make_or_reuse(
    workspace: Workspace,
    name: str,
    inputs: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, Any]],
) -> MadeModel:
    """Return the model NAME-DIGEST of the cache; if it is missing, call `make` to fill its folder.

    Print whether the model was reused or made. See `folder_cache.make_once` for the arguments.
    """
    if address := workspace.find(folder_cache.folder_of(workspace.cache, name, inputs)):
        model = _published(workspace, address, reused=True)
    else:
        cached = folder_cache.make_once(workspace.cache, name, inputs, make)
        if workspace.store:
            # Another run may have published its own model first.
            address = workspace.publish(cached.path)
            model = _published(workspace, address, reused=cached.reused)
        else:
            model = MadeModel(
                place=str(cached.path),
                digest=cached.digest,
                values=cached.values,
                reused=cached.reused,
            )
    print(f"{name}: {'reused' if model.reused else 'made'} {model.place}", flush=True)
    return model


def _published(workspace: Workspace, address: str, *, reused: bool) -> MadeModel:
    made = folder_cache.Made.parse(workspace.read(address, folder_cache.MADE_FILE))
    return MadeModel(place=address, digest=made.digest, values=made.values, reused=reused)


def can_be_reused(workspace: Workspace, name: str, inputs: Mapping[str, Any]) -> bool:
    """Return whether `make_or_reuse` would find the model in the cache."""
    folder = folder_cache.folder_of(workspace.cache, name, inputs)
    return folder_cache.is_made(folder) or workspace.find(folder) is not None


def move_files(source: Path, target: Path) -> None:
    """Move the files of a trained model into its folder of the cache, which may be another disk."""
    for file in source.iterdir():
        shutil.move(file, target / file.name)
