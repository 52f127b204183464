"""A spot instance that trains with PPO or SFT, and shares nothing but S3 with others.

    python -m tests.helpers.aws.spot_machine TRAINING FOLDER INPUTS PREFIX PHASE

TRAINING is ppo or sft, INPUTS are those of `write_ppo_inputs` as JSON. An empty PREFIX copies
nothing to S3. AWS takes the instance in PHASE, see `noticed_training`; an empty PHASE lets it live.
"""

import json
import sys
from pathlib import Path

from pipeline.launch import launcher, supervised_training
from pipeline.launch.checkpoint_mirror import mirrored
from pipeline.settings.make_settings import make_settings
from pipeline.settings.training_sections import SupervisedSection
from pipeline.storage.workspace import Workspace
from ppo_core.data.rows.read_rows import read_source
from ppo_core.data.sources.source import source_of_rows
from tests.helpers.servers.servers import BUCKET

UPDATES = STEPS = 8

PPO = {
    "resume_from_checkpoint": "latest",
    "total_episodes": 8 * UPDATES,
    "batch_size": 8,
    "per_device_train_batch_size": 4,
    "local_rollout_forward_batch_size": 4,
    "response_length": 8,
    "learning_rate": 1e-3,
    "save_steps": 3,
    "save_total_limit": 2,
    "num_sample_generations": 0,
    "disable_tqdm": True,
    "use_cpu": True,
}
SFT = SupervisedSection(learning_rate=1e-2, batch_size=4, num_epochs=2, max_length=64, save_steps=3)


def train_ppo(folder: Path, inputs: dict[str, str], program: tuple[str, ...]) -> None:
    """Train as the step `train_policy` does."""
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "settings.json"
    places = {"output_dir": str(folder), "policy_dir": str(folder.parent / "model")}
    job.write_text(json.dumps(PPO | inputs | places))
    launcher.train(job, processes=1, program=program)


def train_sft(folder: Path, inputs: dict[str, str], program: tuple[str, ...]) -> None:
    """Train as the step `load_policy` does."""
    supervised_training.PROGRAM = program
    rows = [{"prompt": f"w{n}", "completion": "w1 " * (1 + n % 6)} for n in range(2 * STEPS)]
    settings = make_settings({"processes": 1}, {"policy": "p", "preferences": "a", "prompts": "b"})
    model = inputs["model_name_or_path"]
    supervised_training.train_supervised(
        supervised_training.supervised_job("sft", model, SFT, settings, folder.parent / "model"),
        read_source(source_of_rows(rows), "demonstrations", is_chat=False),
        settings,
        folder=folder,
        on_metrics=lambda step, metrics: None,
    )


if __name__ == "__main__":
    training, root, inputs, prefix, phase = sys.argv[1:]
    start, module = {"ppo": (train_ppo, "ppo_core"), "sft": (train_sft, "ppo_core.supervised")}[
        training
    ]
    # A notice of its own: the trainings of other tests on this machine go on.
    launcher.SPOT_NOTICE = Path(root).with_suffix(".notice")
    noticed = ("tests.helpers.jobs.noticed_training", phase, str(launcher.SPOT_NOTICE), module)
    folder = Path(root) / training
    with mirrored(Workspace(root, prefix and f"s3://{BUCKET}/{prefix}"), folder):
        start(folder, json.loads(inputs), noticed if phase else (module,))
