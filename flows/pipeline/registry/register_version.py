"""Register a policy as a version of a registered model: one version per run of the flow."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from pipeline.inputs.lineage import FLOW_RUN
from pipeline.registry.aliases import unless_deleted
from pipeline.registry.decisions import Decision
from pipeline.registry.logged_models import LoggedModels, logged_model_id, uploading
from pipeline.tracking.mlflow_client import connect, explained
from ppo_core.errors import ModelError
from ppo_core.reporting.escaping import as_markdown
from serving.manifest import CARD, MANIFEST_TAG

DESCRIPTION = (
    "Policies registered by flows/rlhf.py. The alias champion names the one in use; who became "
    "champion, when and why is in the experiment promotions of "
)
"""First words of a registered model's description, in Markdown; the name of the model follows."""

MAX_DESCRIPTION_CHARACTERS = 5000
"""Maximum length of a version's description in MLflow's database."""

CUT_DESCRIPTION = "\n\n... cut here: README.md among the version's artifacts has all of it."


@explained()
def register_version(
    name: str,
    *,
    run_id: str,
    flow_run: str,
    write: Callable[[Path, str], str],
    tags: Mapping[str, str],
    description: str,
    scratch: Path | None = None,
) -> dict[str, str]:
    """Register the model that `write` makes; it becomes the only version of a run of the flow.

    A step may be killed and retried, or run twice at once. MLflow's client may also create a
    version twice if a reply of the registry is lost. Therefore the lowest version number of the
    run is claimed as a parameter of the MLflow run; MLflow never changes a parameter. Every copy of
    the step keeps the claimed version and deletes the run's other versions. A complete upload is
    not repeated.

    Args:
        name: name of the registered model, which is created if needed.
        run_id: id of the MLflow run that the version comes from.
        flow_run: id of the run of the flow, which gets one version even if it is retried.
        write: function that takes a new folder and the id of a logged model. It writes an MLflow
            model into the folder and returns the digest of the manifest; see `write_artifact`.
        tags: further tags of the version.
        description: description of the version, in Markdown.
        scratch: folder for the files of the version during the upload; None for the temporary
            folder of the system, which may be in memory.

    Returns:
        Dict with `name`, `version` and `uri` of the registered version, `run_id` of the MLflow run,
        and `manifest`, the digest of the manifest.

    Raises:
        ModelError: the registry refuses the request or does not answer, or the version was deleted.
    """
    client = connect()
    versions = _FlowRunVersions(name, LoggedModels(client, run_id, flow_run))
    number = versions.claimed()
    if number is None:
        try:
            versions.create(write, tags, description, scratch)
        except (MlflowException, ModelError):
            # Another copy of this step may have been faster and deleted this copy's upload.
            if not versions.find():
                raise
        number = versions.claim()
    version = versions.keep_only(number)
    return {
        "name": name,
        "version": number,
        "uri": f"models:/{name}/{number}",
        "run_id": run_id,
        "manifest": version.tags[MANIFEST_TAG],
    }


@explained()
def decided_on(name: str, decisions: Sequence[Decision], tags: Mapping[str, str]) -> int:
    """Count the versions with the same data that a run has promoted or refused.

    The first of the `tags` that a version has is compared.
    """

    def is_equal(version: ModelVersion) -> bool:
        tag = next((tag for tag in tags if tag in version.tags), None)
        return tag is not None and version.tags[tag] == tags[tag]

    found = connect().search_model_versions(f"name = '{name}'")
    equal = {int(one.version) for one in found if is_equal(one)}
    return len(equal & {one.version for one in decisions if one.is_of_run})


@explained()
def write_card(name: str, version: str | int, card: str, description: str) -> None:
    """Replace the model card (README.md) and the description of a version.

    Raises:
        ModelError: there is no such version, its source is not a logged model, or the registry
            refuses the request.
    """
    client = connect()
    model_id = logged_model_id(client.get_model_version(name, str(version)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CARD
        path.write_text(card, encoding="utf-8")
        with uploading(model_id):
            client.log_model_artifact(model_id, str(path))
    client.update_model_version(name, str(version), _within_limit(description))


@dataclass(frozen=True)
class _FlowRunVersions:
    """The versions that one run of the flow created; a retried step may leave several."""

    name: str
    """The registered model."""

    models: LoggedModels

    def find(self) -> list[ModelVersion]:
        """Return all versions of the run of the flow."""
        found = self._client.search_model_versions(f"run_id = '{self.models.run_id}'")
        flow_run = self.models.flow_run
        return [
            one for one in found if one.name == self.name and one.tags.get(FLOW_RUN) == flow_run
        ]

    def claimed(self) -> str | None:
        """Return the claimed version number; None if no copy of the step has claimed a number."""
        return self._client.get_run(self.models.run_id).data.params.get(self._claim_key)

    def claim(self) -> str:
        """Claim the lowest version number, or return the number that another copy has claimed."""
        lowest = min(int(version.version) for version in self.find())
        try:
            self._client.log_param(self.models.run_id, self._claim_key, str(lowest))
        except MlflowException:
            number = self.claimed()
            if number is None:
                raise
            return number
        return str(lowest)

    def create(
        self,
        write: Callable[[Path, str], str],
        tags: Mapping[str, str],
        description: str,
        scratch: Path | None,
    ) -> None:
        """Upload the model and create a version, unless another copy has created a version."""
        model = self.models.find_complete() or self.models.upload(write, scratch)
        _create_registered_model(self._client, self.name)
        if self.find():
            return
        self._client.create_model_version(
            self.name,
            f"models:/{model.model_id}",
            self.models.run_id,
            tags={
                **tags,
                FLOW_RUN: self.models.flow_run,
                MANIFEST_TAG: model.tags[MANIFEST_TAG],
            },
            description=_within_limit(description),
            model_id=model.model_id,
        )

    def keep_only(self, number: str) -> ModelVersion:
        """Delete the run's other versions and their logged models; return version `number`."""
        kept = None
        for version in self.find():
            if str(version.version) == number:
                kept = version
            else:
                with unless_deleted():
                    self._client.delete_model_version(self.name, str(version.version))
        if kept is None:
            raise ModelError(
                f"Version {number} of {self.name!r}, which this run registered, was deleted. "
                "Start a new run to register the policy again."
            )
        self.models.keep_only(logged_model_id(kept))
        return kept

    @property
    def _client(self) -> MlflowClient:
        return self.models.client

    @property
    def _claim_key(self) -> str:
        """Name of the MLflow run's parameter for the claimed number."""
        return f"model_version/{self.models.flow_run}"


def _create_registered_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name, description=f"{DESCRIPTION}{as_markdown(name)}.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _within_limit(description: str) -> str:
    """Return the description, cut to the maximum length."""
    if len(description) <= MAX_DESCRIPTION_CHARACTERS:
        return description
    room = MAX_DESCRIPTION_CHARACTERS - len(CUT_DESCRIPTION)
    return _whole_lines(description, room) + CUT_DESCRIPTION


def _whole_lines(text: str, limit: int) -> str:
    """Return the full lines of a text within `limit` characters, without an unfinished code block.

    A partial escape sequence or code block would be interpreted as markup.
    """
    lines = text[: limit + 1].split("\n")[:-1]
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    return "\n".join(lines[: fences[-1]] if len(fences) % 2 else lines)
