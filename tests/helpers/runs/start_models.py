"""Versions whose runs have left a reward model and a critic for the next run."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.inputs.row_digests import ROWS_FILE, write_digests
from pipeline.inputs.run_data import RunData
from pipeline.registry.start_models import START_TAG, publish_start
from pipeline.settings.settings import Settings
from pipeline.tracking.mlflow_client import connect
from ppo_core.models.critic import Critic
from ppo_core.models.files.critic_files import write_critic
from ppo_core.models.loading import load_reward_model
from tests.helpers.inputs.pipeline_inputs import write_model


def write_start(folder: Path) -> Path:
    """A reward model as `write_model` writes it, and the critic that is its copy."""
    reward_model, critic = folder / "reward-model", folder / "critic"
    write_model(reward_model, labels=1)
    copied = Critic.from_reward_model(load_reward_model(reward_model))
    critic.mkdir()
    write_critic(copied, copied.model.state_dict(), copied.head.state_dict(), critic)
    return folder


def add_start(settings: Settings, folder: Path, tags: Mapping[str, str] | None = None) -> int:
    """Register a version whose run read the data of the settings and left the models of a folder.

    With `tags`, the version has these tags in place of the tag of the start.
    """
    client, name = connect(), settings.registered_model
    run = client.create_run("0").info.run_id
    write_digests(RunData(settings).digested(), folder / ROWS_FILE)
    digest = publish_start(
        run, folder / "reward-model", folder / "critic", folder / ROWS_FILE, folder
    )
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    made = client.create_model_version(
        name, "unused", run_id=run, tags={START_TAG: digest} if tags is None else dict(tags)
    )
    return int(made.version)
