"""The loop of supervised training, which is transformers' own, and what it leaves behind."""

import math
from collections.abc import Callable, Mapping, Sequence
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

from ppo_core.errors import ConfigError, TrainingError
from ppo_core.reporting.progress_bar import progress
from ppo_core.supervised.config import SupervisedConfig
from ppo_core.supervised.lora import keep_and_merge


def run_training(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    lengths: Sequence[int],
    collate: Callable[[Any], dict[str, Tensor]],
    config: SupervisedConfig,
    description: str,
    output_dir: str | Path,
) -> dict[str, float]:
    """Train a model whose forward pass gives the loss, in place.

    Args:
        model: takes what `collate` gives as keywords.
        rows: token ids by name, as `collate` takes them.
        lengths: the longest text of each row, in tokens.
        collate: rows to a batch.
        config: the settings.
        description: names the training in its progress bar.
        output_dir: where it is saved afterwards; made now.

    Returns:
        "loss", the mean over the last tenth of the run; "rows"; "steps" of the
        optimizer; "seconds".

    Raises:
        ConfigError: the output folder cannot be made.
        TrainingError: the loss is not finite.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir='{output_dir}' cannot be made: {error}.") from error
    trainer = Trainer(
        model=model,
        args=_training_arguments(config, output_dir),
        train_dataset=Dataset.from_list(
            [{**row, "length": length} for row, length in zip(rows, lengths, strict=True)]
        ),
        data_collator=collate,
    )
    trainer.remove_callback(PrinterCallback)
    batches = len(trainer.get_train_dataloader())
    steps = config.num_epochs * math.ceil(batches / config.gradient_accumulation_steps)
    with progress(steps, description, "step") as bar:
        trainer.add_callback(_Report(bar))
        result = trainer.train()
    return {
        "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1],
        "rows": len(rows),
        "steps": trainer.state.global_step,
        "seconds": result.metrics["train_runtime"],
    }


def save_model(trained: Any, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path) -> None:
    """Write the plain model, and beside it the adapter if there is one; the main process does."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    plain = isinstance(trained, PreTrainedModel)
    model = trained if plain else keep_and_merge(trained, output_dir)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


def _training_arguments(config: SupervisedConfig, output_dir: str | Path) -> TrainingArguments:
    """Plain training: nothing is reported, saved or evaluated on the way."""
    return TrainingArguments(
        output_dir=str(output_dir),
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_train_epochs=config.num_epochs,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_ratio,  # below 1 it is a share of the steps
        weight_decay=config.weight_decay,
        seed=config.seed,
        bf16=config.bf16,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=0.1,  # as well
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        # Rows of similar length share a batch, so that little of it is padding.
        train_sampling_strategy="group_by_length",
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class _Report(TrainerCallback):
    """Moves the progress bar, and stops a run whose loss is not finite."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.bar.update(1)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        loss = kwargs["logs"].get("loss")
        if loss is None:  # the closing entry, which sums up the run
            return
        if not math.isfinite(loss):
            raise TrainingError(
                f"The loss is {loss} at step {state.global_step}: the weights are spoilt and "
                "nothing was saved. Lower the learning rate, and look for broken weights in the "
                "model it started from."
            )
        self.bar.set_postfix(loss=f"{loss:.3f}")
