"""Policies as versions of a registered model: exactly one of each run of the flow."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from pipeline.inputs.lineage import FLOW_RUN
from pipeline.registry.aliases import unless_deleted
from pipeline.registry.decisions import shortened
from pipeline.tracking.mlflow_client import connect, explained, registry_address
from ppo_core.errors import ModelError
from serving.manifest import CARD, MANIFEST_TAG
from serving.redaction import without_credentials

LOGGED_MODEL = "policy"
"""Name of the logged model behind a version."""

DESCRIPTION = (
    "Policies registered by flows/rlhf.py. The alias champion names the one in use; who became "
    "champion, when and why is in the experiment promotions of "
)
"""Of a registered model, before its name."""

MAX_DESCRIPTION_CHARACTERS = 5000
"""What the database of MLflow takes as the description of a version."""

CUT_DESCRIPTION = "\n\n... cut here: README.md among the version's artifacts has all of it."


def find_policy(place: str) -> tuple[Path | str, Path | str]:
    """Where the model and the tokenizer of a folder, a hub id or an MLflow URI are.

    Raises:
        ModelError: the registry has no such version, or it is no model of transformers.
    """
    if not place.startswith(("models:/", "runs:/")):
        return place, place
    connect()
    try:
        folder = Path(mlflow.artifacts.download_artifacts(place))
    except (MlflowException, OSError) as error:
        raise ModelError(
            f"{place} cannot be read from the registry at {registry_address()}: "
            f"{without_credentials(error)}. Check the name and the version, or set "
            "MLFLOW_TRACKING_URI."
        ) from error
    model, tokenizer = folder / "model", folder / "components" / "tokenizer"
    if not (model.is_dir() and tokenizer.is_dir()):
        raise ModelError(
            f"{place} holds no model and tokenizer of transformers as mlflow.transformers writes "
            "them. Name another version, or the folder of a model."
        )
    return model, tokenizer


@explained()
def register_version(
    name: str,
    *,
    run_id: str,
    flow_run: str,
    write: Callable[[Path, str], str],
    tags: Mapping[str, str],
    card: str,
    scratch: Path | None = None,
) -> dict[str, str]:
    """Register what `write` makes as the version of a run of the flow, once.

    A step may be killed anywhere and started again, run twice at once, or lose a reply of the
    registry, after which MLflow asks it to create the version again. The lowest number among the
    run's versions is therefore written down as a parameter of the MLflow run, which nobody can
    change; whoever comes later takes that version, and all others of the run are deleted. A policy
    that was uploaded whole is not uploaded again.

    Args:
        name: name of the registered model, which is made if needed.
        run_id: the MLflow run that the version comes from.
        flow_run: the run of the flow, which has one version however often it tries.
        write: fills a new folder with an MLflow model, given the id that it is uploaded under, and
            returns the digest of its manifest, as `write_artifact` does.
        tags: further tags of the version.
        card: the model card, which becomes the description.
        scratch: folder with room for the whole version until it is uploaded; None for the
            system's, which may be in memory.

    Returns:
        name, version and uri of the registered version, the id of the MLflow run, and the digest
        of the manifest.

    Raises:
        ModelError: the registry refuses or gives no answer, or the run's version was deleted.
    """
    client = connect()
    number = _claimed(client, run_id, flow_run)
    if number is None:
        try:
            _make_version(client, name, run_id, flow_run, write, tags, card, scratch)
        except (MlflowException, ModelError):
            # Another copy of this step may have been faster, and deleted this one's upload.
            if not _versions(client, name, run_id, flow_run):
                raise
        number = _claim(client, name, run_id, flow_run)
    version = _keep_only(client, name, number, run_id, flow_run)
    return {
        "name": name,
        "version": number,
        "uri": f"models:/{name}/{number}",
        "run_id": run_id,
        "manifest": version.tags[MANIFEST_TAG],
    }


@explained()
def write_card(name: str, version: str | int, card: str) -> None:
    """Replace the model card of a version: its README.md and its description.

    Raises:
        ModelError: there is no such version, or it is no logged model, or the registry refuses.
    """
    client = connect()
    model_id = _model_id(client.get_model_version(name, str(version)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CARD
        path.write_text(card, encoding="utf-8")
        with _uploading(model_id):
            client.log_model_artifact(model_id, str(path))
    client.update_model_version(name, str(version), _description(card))


@contextmanager
def _uploading(model_id: str) -> Iterator[None]:
    """Say in plain words what the store of artifacts would not take."""
    try:
        yield
    # Each store raises what its own client does: boto's errors share no class with MLflow's.
    except Exception as error:
        raise ModelError(
            f"The store of artifacts did not take the files of {model_id}: "
            f"{without_credentials(error)}. Check the address, the credentials and the free space "
            "there, and go on with `python flows/rlhf.py resume`: nothing is registered twice."
        ) from error


def _claim_key(flow_run: str) -> str:
    """Parameter of the MLflow run with the number that was agreed on for a run of the flow."""
    return f"model_version/{flow_run}"


def _claimed(client: MlflowClient, run_id: str, flow_run: str) -> str | None:
    """The number that was agreed on, if any."""
    return client.get_run(run_id).data.params.get(_claim_key(flow_run))


def _claim(client: MlflowClient, name: str, run_id: str, flow_run: str) -> str:
    """Agree on the lowest number, or learn which one another copy of this step agreed on."""
    lowest = min(int(version.version) for version in _versions(client, name, run_id, flow_run))
    try:
        client.log_param(run_id, _claim_key(flow_run), str(lowest))
    except MlflowException:
        number = _claimed(client, run_id, flow_run)
        if number is None:
            raise
        return number
    return str(lowest)


def _versions(client: MlflowClient, name: str, run_id: str, flow_run: str) -> list[ModelVersion]:
    """All versions that a run of the flow has made by itself, however many."""
    found = client.search_model_versions(f"run_id = '{run_id}'")
    return [one for one in found if one.name == name and one.tags.get(FLOW_RUN) == flow_run]


def _make_version(
    client: MlflowClient,
    name: str,
    run_id: str,
    flow_run: str,
    write: Callable[[Path, str], str],
    tags: Mapping[str, str],
    card: str,
    scratch: Path | None,
) -> None:
    """A version of the run, unless there is one by the time that the policy is uploaded."""
    model = _find_uploaded(client, run_id, flow_run)
    model = model or _upload(client, run_id, flow_run, write, scratch)
    _create_registered_model(client, name)
    if _versions(client, name, run_id, flow_run):
        return
    client.create_model_version(
        name,
        f"models:/{model.model_id}",
        run_id,
        tags={**tags, FLOW_RUN: flow_run, MANIFEST_TAG: model.tags[MANIFEST_TAG]},
        description=_description(card),
        model_id=model.model_id,
    )


def _logged_models(client: MlflowClient, run_id: str, flow_run: str) -> list[LoggedModel]:
    """All models that a run of the flow has begun to upload, the oldest first."""
    found = client.search_logged_models(
        [client.get_run(run_id).info.experiment_id], f"source_run_id = '{run_id}'"
    )
    own = [model for model in found if model.tags.get(FLOW_RUN) == flow_run]
    return sorted(own, key=lambda model: model.creation_timestamp)


def _find_uploaded(client: MlflowClient, run_id: str, flow_run: str) -> LoggedModel | None:
    models = _logged_models(client, run_id, flow_run)
    return next((model for model in models if model.status == LoggedModelStatus.READY), None)


def _upload(
    client: MlflowClient,
    run_id: str,
    flow_run: str,
    write: Callable[[Path, str], str],
    scratch: Path | None,
) -> LoggedModel:
    """A logged model that is READY only once all of its files are there."""
    model = client.create_logged_model(
        client.get_run(run_id).info.experiment_id,
        LOGGED_MODEL,
        source_run_id=run_id,
        tags={FLOW_RUN: flow_run},
    )
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        digest = write(Path(folder), model.model_id)
        with _uploading(model.model_id):
            client.log_model_artifacts(model.model_id, folder)
    client.set_logged_model_tags(model.model_id, {MANIFEST_TAG: digest})
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def _create_registered_model(client: MlflowClient, name: str) -> None:
    try:
        client.create_registered_model(name, description=f"{DESCRIPTION}{name}.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _keep_only(
    client: MlflowClient, name: str, number: str, run_id: str, flow_run: str
) -> ModelVersion:
    """Delete all versions of the run but one, and whatever was uploaded in vain."""
    kept = None
    for version in _versions(client, name, run_id, flow_run):
        if str(version.version) == number:
            kept = version
        else:
            with unless_deleted():
                client.delete_model_version(name, str(version.version))
    if kept is None:
        raise ModelError(
            f"Version {number} of {name!r}, which this run registered, is not there any more: "
            "somebody deleted it. Start a new run to register the policy again."
        )
    for model in _logged_models(client, run_id, flow_run):
        if model.model_id != _model_id(kept):
            client.delete_logged_model(model.model_id)
    _show_with_run(client, run_id, _model_id(kept))
    return kept


def _show_with_run(client: MlflowClient, run_id: str, model_id: str) -> None:
    """Make a logged model an output of the run; MLflow refuses to do that twice."""
    try:
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])
    except MlflowException:
        outputs = client.get_run(run_id).outputs
        if outputs is None or model_id not in {model.model_id for model in outputs.model_outputs}:
            raise


def _model_id(version: ModelVersion) -> str:
    """The logged model that is the source of a version."""
    if version.source is None or not version.source.startswith("models:/m-"):
        raise ModelError(
            f"Version {version.version} of {version.name!r} comes from {version.source}, which is "
            "no logged model: it has no model card to replace. Name a version that the flow made."
        )
    return version.source.removeprefix("models:/")


def _description(card: str) -> str:
    """The card as the description of a version: without its front matter, cut if it is long."""
    text = card
    if card.startswith("---\n"):
        text = card.partition("\n---\n")[2].strip()
    return shortened(text, MAX_DESCRIPTION_CHARACTERS, CUT_DESCRIPTION)
