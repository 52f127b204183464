"""Manage MLflow's logged models, which contain the uploaded files of a version."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from pipeline.inputs.lineage import FLOW_RUN
from ppo_core.data.model_files import safetensors_as_os_errors
from ppo_core.errors import ModelError
from ppo_core.io.atomic_files import explained_writes
from serving.manifest import MANIFEST_TAG

LOGGED_MODEL = "policy"
"""Name of the logged model behind a version."""


@dataclass(frozen=True)
class LoggedModels:
    """The logged models of one run of the flow; a retried step may leave several."""

    client: MlflowClient
    run_id: str
    """Id of the MLflow run."""
    flow_run: str
    """Id of the run of the flow."""

    def find(self) -> list[LoggedModel]:
        """Return all models whose upload was started, the oldest first."""
        found = self.client.search_logged_models(
            [self._experiment_id()], f"source_run_id = '{self.run_id}'"
        )
        own = [model for model in found if model.tags.get(FLOW_RUN) == self.flow_run]
        return sorted(own, key=lambda model: model.creation_timestamp)

    def find_complete(self) -> LoggedModel | None:
        """Return the oldest model whose upload is complete; None if there is none."""
        ready = (model for model in self.find() if model.status == LoggedModelStatus.READY)
        return next(ready, None)

    def upload(self, write: Callable[[Path, str], str], scratch: Path | None) -> LoggedModel:
        """Call `write` to make a model in a new folder, upload the model, and mark it READY.

        The new folder is in `scratch`; if `scratch` is None, in the system's temporary folder.
        """
        model = self.client.create_logged_model(
            self._experiment_id(),
            LOGGED_MODEL,
            source_run_id=self.run_id,
            tags={FLOW_RUN: self.flow_run},
        )
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            with explained_writes(Path(folder)), safetensors_as_os_errors():
                digest = write(Path(folder), model.model_id)
            with uploading(model.model_id):
                self.client.log_model_artifacts(model.model_id, folder)
        self.client.set_logged_model_tags(model.model_id, {MANIFEST_TAG: digest})
        return self.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)

    def keep_only(self, model_id: str) -> None:
        """Delete all models but `model_id`, and make `model_id` an output of the MLflow run."""
        for model in self.find():
            if model.model_id != model_id:
                self.client.delete_logged_model(model.model_id)
        try:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(model_id, step=0)])
        except MlflowException:
            # MLflow refuses an output that the run already has.
            outputs = self.client.get_run(self.run_id).outputs
            if outputs is None or model_id not in [one.model_id for one in outputs.model_outputs]:
                raise

    def _experiment_id(self) -> str:
        return self.client.get_run(self.run_id).info.experiment_id


def logged_model_id(version: ModelVersion) -> str:
    """Return the id of the logged model that is the source of a version.

    Raises:
        ModelError: the source of the version is not a logged model.
    """
    if version.source is None or not version.source.startswith("models:/m-"):
        raise ModelError(
            f"Version {version.version} of {version.name!r} was not registered by this flow "
            f"(source: {version.source}), so it has no model card to replace. Name a version that "
            "the flow registered."
        )
    return version.source.removeprefix("models:/")


@contextmanager
def uploading(model_id: str) -> Iterator[None]:
    """Raise every error of the artifact store as a ModelError."""
    try:
        yield
    # The client of each store has its own errors. For example, boto's errors are not MLflow errors.
    except Exception as error:
        raise ModelError(
            f"The artifact store did not accept the files of {model_id}: {error}. Check the "
            "address, the credentials and the free space there, and continue with "
            "`python flows/rlhf.py resume`: nothing is registered twice."
        ) from error
