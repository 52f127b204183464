"""Run supervised training with transformers.Trainer, and save the trained model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from ppo_core.data.model_files import replaced_together, save_tokenizer
from ppo_core.data.progress_bar import progress
from ppo_core.errors import ConfigError, TrainingError
from ppo_core.supervised.lora import save_and_merge
from ppo_core.supervised.supervised_config import SupervisedConfig


def run_training(
    model: nn.Module,
    rows: Dataset,
    collate: Callable[[Any], dict[str, Tensor]],
    config: SupervisedConfig,
    description: str,
    output_dir: str | Path,
) -> dict[str, float]:
    """Train a model in place.

    Args:
        model: model whose forward pass takes a batch's tensors by name and returns the loss.
        rows: encoded rows, with the number of tokens of the longest text in the column `length`.
        collate: function that makes a batch from encoded rows.
        config: the settings, whose learning rate is a number.
        description: name of the training in the progress bar.
        output_dir: folder for the trained model; created before training.

    Returns:
        Metrics: "loss" (mean over the last tenth of the run), "rows", "steps" (optimizer steps),
        "seconds" and "learning_rate".

    Raises:
        ConfigError: the output folder cannot be created.
        TrainingError: the loss is not finite.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir='{output_dir}' cannot be created: {error}.") from error
    trainer = _LengthGroupingTrainer(
        model=model,
        args=_training_arguments(config, output_dir),
        train_dataset=rows,
        data_collator=collate,
    )
    trainer.remove_callback(PrinterCallback)
    batches = len(trainer.get_train_dataloader())
    steps = config.num_epochs * math.ceil(batches / config.gradient_accumulation_steps)
    with progress(steps, description, "step") as bar:
        trainer.add_callback(_ProgressCallback(bar))
        result = trainer.train()
    return {
        "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1],
        "rows": len(rows),
        "steps": trainer.state.global_step,
        "seconds": result.metrics["train_runtime"],
        "learning_rate": trainer.args.learning_rate,
    }


def save_model(trained: Any, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path) -> None:
    """Write the trained model and its tokenizer, in the main process only.

    The files are written completely or not at all. An adapter is saved separately, and also merged
    into the written model.

    Raises:
        TrainingError: a file cannot be written, for example because the disk is full.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    plain = isinstance(trained, PreTrainedModel)
    with replaced_together(Path(output_dir)) as unfinished:
        model = trained if plain else save_and_merge(trained, unfinished)
        model.save_pretrained(unfinished)
        save_tokenizer(tokenizer, unfinished)


def _training_arguments(config: SupervisedConfig, output_dir: str | Path) -> TrainingArguments:
    """Return arguments for transformers.Trainer without reports, checkpoints and evaluation."""
    assert isinstance(config.learning_rate, int | float)
    return TrainingArguments(
        output_dir=str(output_dir),
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_train_epochs=config.num_epochs,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_ratio,  # a value below 1 is a fraction of the steps
        weight_decay=config.weight_decay,
        seed=config.seed,
        bf16=config.bf16,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=0.1,  # a fraction of the steps
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        # Batch rows of similar length, which need less padding.
        train_sampling_strategy="group_by_length",
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class _LengthGroupingTrainer(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        assert isinstance(sampler, LengthGroupedSampler)
        # The column of a data set would be read from disk number by number, in random order.
        sampler.lengths = sampler.lengths[:]
        return sampler


class _ProgressCallback(TrainerCallback):
    """Callback that advances the progress bar, and raises if the loss is not finite."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.bar.update(1)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        loss = kwargs["logs"].get("loss")
        if loss is None:  # the last log entry is a summary of the run without "loss"
            return
        if not math.isfinite(loss):
            raise TrainingError(
                f"The loss is {loss} at step {state.global_step}, so the weights are unusable "
                "and were not saved. Lower learning_rate, and check the initial model for weights "
                "that are not finite."
            )
        self.bar.set_postfix(loss=f"{loss:.3f}")
