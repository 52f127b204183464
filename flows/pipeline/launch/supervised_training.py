"""Run SFT, or the training of a reward model, in separate processes, in the same way as PPO."""

from pathlib import Path
from typing import Literal

from pipeline.launch.commands import ONE_MACHINE, Machines
from pipeline.launch.launcher import OnMetrics, train
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import SupervisedSection
from ppo_core.data.rows.read_rows import Rows
from ppo_core.data.rows.rows_on_disk import write_rows
from ppo_core.supervised.job import SupervisedJob, write_job

PROGRAM = ("ppo_core.supervised",)

Training = Literal["sft", "reward"]


def supervised_job(
    training: Training, model: str, section: SupervisedSection, settings: Settings, model_dir: Path
) -> SupervisedJob:
    """Return the job of a training.

    Args:
        training: `sft`, or `reward` for a reward model.
        model: folder or hub id of the model to start from.
        section: settings of the training.
        settings: settings of the run.
        model_dir: folder for the trained model.
    """
    return SupervisedJob(
        training=training,
        model=model,
        model_dir=str(model_dir),
        prompt_format=settings.prompt_format,
        overlong=settings.overlong,
        config=section.training_settings(),
        lora=section.lora_arguments(),
    )


def train_supervised(
    job: SupervisedJob,
    rows: Rows,
    settings: Settings,
    *,
    folder: Path,
    machines: Machines = ONE_MACHINE,
    on_metrics: OnMetrics,
) -> None:
    """Train a model, or resume its training from the last checkpoint in `folder`.

    After the training, `ppo_core.supervised.job.read_result(folder)` returns its metrics.

    Args:
        job: the job of the training; see `supervised_job`.
        rows: demonstrations or pairs.
        settings: settings of the run.
        folder: folder of the job, its metrics and its checkpoints.
        machines: the machines of the training; if they share no disk, see `mirrored`.
        on_metrics: see `train`.

    Raises:
        RunInterruptedError: SIGTERM arrived, and a checkpoint was saved.
        ProcessError: a process died, failed unexpectedly, was frozen, or made no progress.
        PPOError: a process failed with an error of the project; the same error is raised here.
    """
    write_rows(rows, folder)
    train(
        write_job(job, folder),
        processes=settings.processes,
        machines=machines,
        program=PROGRAM,
        stall_minutes=settings.stall_minutes,
        on_metrics=on_metrics,
    )
