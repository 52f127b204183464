"""A training whose settings are in a file: `python -m ppo_core.supervised JOB.json`.

The flow (the Metaflow pipeline) starts each supervised training in this way. The folder of the file
also contains the rows (see `write_rows`), the metrics, the checkpoints and the result.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppo_core.config.row_settings import Overlong, PromptFormat
from ppo_core.distributed.process import is_main_process, large_imports
from ppo_core.errors import ConfigError, PPOError
from ppo_core.io.atomic_files import explained_writes, write_atomically
from ppo_core.io.progress_bar import ProgressFile, listening
from ppo_core.supervised.supervised_config import SupervisedConfig

JOB_FILE, _RESULT = "settings.json", "result.json"


@dataclass(frozen=True, kw_only=True)
class SupervisedJob:
    """One training of the flow."""

    training: str
    """`sft` or `reward`."""

    model: str
    """Folder or hub id of the model to start from."""

    model_dir: str
    """Folder for the trained model."""

    prompt_format: PromptFormat
    """How the model reads prompts; see `set_prompt_format`."""

    overlong: Overlong
    """What happens to a row that is too long."""

    config: dict[str, Any]
    """Settings of the training, as a dict of a `SupervisedConfig`."""

    lora: dict[str, Any] | None
    """Arguments of `peft.LoraConfig`; None trains all weights."""


def write_job(job: SupervisedJob, folder: Path) -> Path:
    """Write a job into a folder, and return the job's file.

    Raises:
        TrainingError: the file cannot be written.
    """
    file = folder / JOB_FILE
    with explained_writes(file):
        write_atomically(file, json.dumps(asdict(job), indent=2))
    return file


def read_result(folder: Path) -> dict[str, float]:
    """Return the metrics of the finished job in this folder."""
    result: dict[str, float] = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
    return result


def run_job(file: Path, prepare: Callable[..., None]) -> dict[str, float]:
    """Run a job, or resume it from its newest checkpoint; return its metrics.

    `prepare` sets up the process. It is called with the sharding, and with `trains_adapter`:
    whether only an adapter is trained.

    Raises:
        ConfigError: the file cannot be read or is not a valid job, or a setting cannot be used.
        DataError: there are no rows, or too many of them cannot be used or are too long.
        ModelError: the model or its tokenizer cannot be loaded or used.
        RunInterruptedError: SIGTERM stopped the training.
        TrainingError: the training failed.
    """
    try:
        job = SupervisedJob(**json.loads(file.read_text(encoding="utf-8")))
        config = SupervisedConfig(**job.config)
    except PPOError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"'{file}' is not a job of this version: {error}. To train from a shell, give flags: "
            "python -m ppo_core.supervised sft --help."
        ) from error
    prepare(job.config.get("sharding"), trains_adapter=job.lora is not None)
    # Imported here: reading the file needs no torch.
    with large_imports():
        from ppo_core.data.rows.rows_on_disk import read_written_rows
        from ppo_core.models.adapters import lora_config
        from ppo_core.supervised.training import train_reward_model, train_sft

    folder = file.parent
    train = train_sft if job.training == "sft" else train_reward_model
    with listening(ProgressFile(folder)):
        metrics = train(
            job.model,
            read_written_rows(folder),
            config,
            folder,
            prompt_format=job.prompt_format,
            overlong=job.overlong,
            peft_config=None if job.lora is None else lora_config(**job.lora),
            resume=True,
            model_dir=job.model_dir,
        )
    if is_main_process():
        write_atomically(folder / _RESULT, json.dumps(metrics))
    return metrics
