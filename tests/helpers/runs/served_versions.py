"""Versions of a registered model as the flow lays them out, for tests of who loads them."""

from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient

from flows.serving.manifest import write_manifest
from tests.helpers.models.tiny import make_policy, make_tokenizer

NAME = "rlhf-policy"


def write_version(folder: Path, *, seed: int = 0) -> Path:
    """A policy as the flow lays it out, without its manifest."""
    make_policy(seed=seed).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "components" / "tokenizer")
    (folder / "MLmodel").write_text("flavors: {}\n")
    (folder / "requirements.txt").write_text("transformers\n")
    (folder / "README.md").write_text("A policy.\n")
    return folder


def register(
    client: MlflowClient, folder: Path, *, tags: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """A version of `NAME` with these files, now the champion: its number and where its files are.

    Without tags of its own, it gets a manifest, and the tag for it.
    """
    if tags is None:
        tags = {"manifest": write_manifest(folder)}
    model_id = client.create_logged_model("0").model_id
    client.log_model_artifacts(model_id, str(folder))
    client.finalize_logged_model(model_id, "READY")
    if not client.search_registered_models(f"name = '{NAME}'"):
        client.create_registered_model(NAME)
    made = client.create_model_version(
        NAME, f"models:/{model_id}", tags=dict(tags), model_id=model_id
    )
    client.set_registered_model_alias(NAME, "champion", made.version)
    return str(made.version), client.get_logged_model(model_id).artifact_location
