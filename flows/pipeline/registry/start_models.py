"""Store the models from which the next run may start, and fetch these models.

The models are artifacts of the MLflow run of a version, in the folder START:

    reward-model/     the reward model of the run, or its members
    critic/           PPO's critic, see `critic_files`
    rows.parquet      digests of the rows that the run read, see ROWS_FILE
    manifest.json     digests of these files; the tag START_TAG of the version has its digest

The models are not files of the version itself, so a service never downloads them.
"""

import shutil
import tempfile
from pathlib import Path

from pipeline.inputs.flow_run import CRITIC, REWARD_MODEL, ChampionStart
from pipeline.inputs.row_digests import ROWS_FILE
from pipeline.registry.artifact import ADAPTER
from pipeline.registry.logged_models import uploading
from pipeline.registry.seen_rows import ANSWER_SECONDS
from pipeline.tracking.mlflow_client import connect, explained
from ppo_core.io.atomic_files import explained_writes
from ppo_core.io.folder_cache import MADE_FILE, link_or_copy
from serving.artifact_store import open_store_at, prepare_mlflow
from serving.champion import fetch_verified, manifest_digest
from serving.manifest import write_manifest

START = "start-of-next-run"
"""Folder of the artifacts in the MLflow run."""

START_TAG = "start_manifest"
"""Tag of a version and of its MLflow run with the SHA-256 of the manifest."""


@explained()
def publish_start(run_id: str, reward_model: Path, critic: Path, rows: Path, scratch: Path) -> str:
    """Upload the models of a run for the next run; return the SHA-256 of their manifest.

    A complete upload is not repeated.

    Args:
        run_id: id of the MLflow run.
        reward_model: folder of the reward model.
        critic: folder of the critic.
        rows: file with the digests of the rows that the run read.
        scratch: folder for temporary files, on the same disk as the models.

    Raises:
        ModelError: MLflow does not answer, the store refuses the files, or a file could run code.
    """
    client = connect()
    uploaded = client.get_run(run_id).data.tags.get(START_TAG)
    if uploaded is not None:
        return uploaded
    left_out = shutil.ignore_patterns(MADE_FILE, ADAPTER)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        with explained_writes(folder):
            for model, part in ((reward_model, REWARD_MODEL), (critic, CRITIC)):
                shutil.copytree(model, folder / part, ignore=left_out, copy_function=link_or_copy)
            shutil.copyfile(rows, folder / ROWS_FILE)
            digest = write_manifest(folder)
        with uploading(f"the models for the next run, of run {run_id}"):
            client.log_artifacts(run_id, name, START)
    client.set_tag(run_id, START_TAG, digest)
    return digest


@explained()
def fetch_start(name: str, version: int, cache: Path) -> ChampionStart | None:
    """Download and verify the models of a version for the next run; None if it has none.

    Raises:
        ModelError: MLflow does not answer, there is no such version, or a file is missing, was
            changed, or could run code.
    """
    prepare_mlflow()
    found = connect().get_model_version(name, str(version))
    if START_TAG not in found.tags:
        return None
    what = f"The models of version {version} of {name!r} for the next run"
    digest = manifest_digest(found.tags, START_TAG, what)
    folder = fetch_verified(
        lambda: open_store_at(lambda: f"runs:/{found.run_id}/{START}", what, ANSWER_SECONDS),
        digest,
        cache,
        what,
        ANSWER_SECONDS,
    )
    return ChampionStart(version=version, path=str(folder), digest=digest)
