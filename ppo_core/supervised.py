"""SFT and reward-model training: encoding, checks and two losses over transformers.Trainer."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from ppo_core.config import SupervisedConfig
from ppo_core.errors import DataError, ModelError, TrainingError
from ppo_core.models import context_length, load_policy, load_tokenizer
from ppo_core.progress import progress
from ppo_core.prompts import encode_prompt, encode_response
from ppo_core.tensors import length_mask, pad_rows

IGNORED_LABEL = -100
"""Target of a token that does not count in the loss; torch's own convention."""


# --- The two trainings -----------------------------------------------------------


def train_sft(
    model: str | Path,
    examples: Sequence[Mapping[str, str]],
    config: SupervisedConfig,
    output_dir: str | Path,
) -> dict[str, float]:
    """Teach a causal model to answer prompts as the examples do.

    Only the tokens of the completion count in the loss. The trained model and its
    tokenizer are saved in `output_dir`.

    Args:
        model: folder or hub id of the model to start from.
        examples: rows with the texts "prompt" and "completion".
        config: the settings.
        output_dir: where to save.

    Returns:
        "loss", the mean over the last tenth of the run; "rows"; "steps" of the
        optimizer; "seconds".

    Raises:
        DataError: there are no rows, a text is no string, or a row is empty or too long.
        TrainingError: the loss is not finite.
    """
    tokenizer = load_tokenizer(model)
    rows = [encode_example(tokenizer, row, number, config) for number, row in enumerate(examples)]
    set_seed(config.seed)
    policy = load_policy(model)
    _require_usable([len(row["input_ids"]) for row in rows], policy, config)
    metrics = _train(policy, rows, collate_examples, config, "SFT", output_dir)
    _save(policy, tokenizer, output_dir)
    return metrics


def train_reward_model(
    model: str | Path,
    pairs: Sequence[Mapping[str, str]],
    config: SupervisedConfig,
    output_dir: str | Path,
) -> dict[str, float]:
    """Teach a model to score the chosen response of each pair above the rejected one.

    The model gets a new head with one output, read at the last token. The trained
    model and its tokenizer are saved in `output_dir`.

    Args:
        model: folder or hub id of a decoder-only model, for example the SFT policy.
        pairs: rows with the texts "chosen" and "rejected", and "prompt" where there is one.
        config: the settings.
        output_dir: where to save.

    Returns:
        "loss", the mean over the last tenth of the run; "rows"; "steps" of the
        optimizer; "seconds".

    Raises:
        DataError: there are no rows, a text is no string, or a row is empty or too long.
        ModelError: the architecture has no last-token classifier.
        TrainingError: the loss is not finite.
    """
    tokenizer = load_tokenizer(model)
    rows = [encode_pair(tokenizer, row, number, config) for number, row in enumerate(pairs)]
    set_seed(config.seed)
    classifier = make_classifier(load_policy(model), tokenizer.pad_token_id)
    _require_usable([max(map(len, row.values())) for row in rows], classifier, config)
    ranker = PairRanker(classifier)
    metrics = _train(ranker, rows, collate_pairs, config, "reward model", output_dir)
    _save(classifier, tokenizer, output_dir)
    return metrics


# --- From texts to batches -------------------------------------------------------


def encode_example(
    tokenizer: PreTrainedTokenizerBase,
    row: Mapping[str, str],
    number: int,
    config: SupervisedConfig,
) -> dict[str, list[int]]:
    """Token ids of prompt and completion, and labels that leave the prompt out."""
    prompt = encode_prompt(tokenizer, _text(row, "prompt", number))
    completion = _text(row, "completion", number)
    response = encode_response(tokenizer, completion, end=config.end_of_text)
    if not response:
        raise DataError(
            f"Row {number} has an empty completion, so there is no token to learn. "
            "Drop the row, or set end_of_text=True if an empty answer is meant."
        )
    return {
        "input_ids": prompt + response,
        "labels": [IGNORED_LABEL] * len(prompt) + response,
    }


def encode_pair(
    tokenizer: PreTrainedTokenizerBase,
    row: Mapping[str, str],
    number: int,
    config: SupervisedConfig,
) -> dict[str, list[int]]:
    """Token ids of the prompt with the chosen, and with the rejected response."""
    prompt = encode_prompt(tokenizer, _text(row, "prompt", number) if "prompt" in row else "")
    return {
        name: prompt + encode_response(tokenizer, _text(row, name, number), end=config.end_of_text)
        for name in ("chosen", "rejected")
    }


def collate_examples(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """Padded on the right: input_ids, labels and attention_mask, each (B, T)."""
    input_ids, lengths = pad_rows([row["input_ids"] for row in rows])
    labels, _ = pad_rows([row["labels"] for row in rows])
    counted = length_mask(lengths, input_ids.shape[1])
    return {
        "input_ids": input_ids,
        "labels": labels.masked_fill(~counted, IGNORED_LABEL),
        "attention_mask": counted.long(),
    }


def collate_pairs(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """Padded on the right: input_ids (B, 2, T) and lengths (B, 2), the chosen response first."""
    sequences = [row[name] for row in rows for name in ("chosen", "rejected")]
    return {
        "input_ids": _pad(sequences, 0).view(len(rows), 2, -1),
        "lengths": torch.tensor([len(ids) for ids in sequences]).view(len(rows), 2),
    }


def _pad(sequences: Sequence[list[int]], value: int) -> Tensor:
    """(B, T) from B lists. The value is never read: masks and lengths say what counts."""
    longest = max(map(len, sequences))
    return torch.tensor([ids + [value] * (longest - len(ids)) for ids in sequences])


def _text(row: Mapping[str, str], column: str, number: int) -> str:
    if column not in row:
        raise DataError(
            f"Row {number} has no column '{column}'; it has: {', '.join(map(str, row))}. "
            "Rename the column in the data."
        )
    text = row[column]
    if not isinstance(text, str):
        raise DataError(
            f"Row {number}: '{column}' is {type(text).__name__}, not text: {text!r:.80}. "
            "Convert or drop the row."
        )
    return text


def _require_usable(
    lengths: Sequence[int], model: PreTrainedModel, config: SupervisedConfig
) -> None:
    """Refuse no rows, rows without a token, and rows longer than the settings or the model."""
    if not lengths:
        raise DataError("There are no rows to train on: the data set is empty.")
    if 0 in lengths:
        raise DataError(
            f"Row {lengths.index(0)} has no token at all. Drop it, or set end_of_text=True."
        )
    context = context_length(model.config) or config.max_length
    limit = min(config.max_length, context)
    too_long = [number for number, length in enumerate(lengths) if length > limit]
    if too_long:
        raise DataError(
            f"{len(too_long)} of {len(lengths)} rows are longer than {limit} tokens "
            f"(max_length={config.max_length}, the model's context {context}); the first is row "
            f"{too_long[0]} with {lengths[too_long[0]]}. Shorten or drop them, or raise max_length."
        )


# --- The model of pairs ----------------------------------------------------------


def make_classifier(policy: PreTrainedModel, pad_token_id: int | None) -> PreTrainedModel:
    """A classifier with one output over a copy of the policy's backbone.

    Not `AutoModelForSequenceClassification.from_pretrained`: where a checkpoint keeps tied
    embeddings under the name of the head, that one starts from random embeddings, with a
    line in the log.
    """
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    config.pad_token_id = pad_token_id
    classifier = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    classifier.base_model.load_state_dict(policy.base_model.state_dict())
    return classifier


class PairRanker(nn.Module):
    """A reward model as it is trained: its forward pass gives the loss of a batch of pairs.

    The score is read at the last counted token, found from the lengths: comparing
    tokens with the pad id would go wrong where a text contains it or pad equals eos.
    """

    def __init__(self, classifier: PreTrainedModel) -> None:
        """Take the classifier's backbone and give it a new head.

        The head's weights are drawn from N(0, 1 / (d + 1)) for a hidden size of d, so
        that scores start near 0 (arXiv:2403.17031).
        """
        super().__init__()
        head = getattr(classifier, "score", None)
        if not isinstance(head, nn.Linear) or classifier.base_model is classifier:
            raise ModelError(
                f"{type(classifier).__name__} is no last-token classifier: it lacks a linear "
                "'score' on top of its backbone. Start from a decoder-only model such as Llama, "
                "GPT-2, GPT-NeoX or Qwen2."
            )
        self.backbone = classifier.base_model
        self.head = head
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """The loss of pairs: input_ids (B, 2, T) and lengths (B, 2), the chosen response first."""
        scores = self.score(input_ids.flatten(0, 1), lengths.flatten()).view(-1, 2)
        return {"loss": preference_loss(scores[:, 0], scores[:, 1])}

    def score(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Scores (N,) of the sequences input_ids (N, T), padded on the right."""
        # A causal row never sees what follows it, so fillers on the right need no mask.
        hidden = self.backbone(input_ids, use_cache=False)
        rows = torch.arange(len(lengths), device=input_ids.device)
        scores: Tensor = self.head(hidden.last_hidden_state[rows, lengths - 1])
        return scores.squeeze(-1)


def preference_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean of -log sigmoid(chosen - rejected), scores (B,) each (arXiv:1909.08593, eq. 1)."""
    return -logsigmoid(chosen - rejected).mean()


# --- The loop, which is transformers' own ------------------------------------------


def _train(
    model: nn.Module,
    rows: list[dict[str, list[int]]],
    collate: Callable[[Sequence[Mapping[str, list[int]]]], dict[str, Tensor]],
    config: SupervisedConfig,
    description: str,
    output_dir: str | Path,
) -> dict[str, float]:
    arguments = _training_arguments(config, output_dir, len(rows))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(
            [{**row, "length": max(map(len, row.values()))} for row in rows]
        ),
        data_collator=collate,
    )
    trainer.remove_callback(PrinterCallback)
    steps = config.num_epochs * len(trainer.get_train_dataloader())
    with progress(steps, description, "step") as bar:
        trainer.add_callback(_Report(bar))
        result = trainer.train()
    return {
        "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1],
        "rows": len(rows),
        "steps": trainer.state.global_step,
        "seconds": result.metrics["train_runtime"],
    }


def _training_arguments(
    config: SupervisedConfig, output_dir: str | Path, num_rows: int
) -> TrainingArguments:
    """Plain training: nothing is reported, saved or evaluated on the way."""
    steps = config.num_epochs * math.ceil(num_rows / config.batch_size)
    return TrainingArguments(
        output_dir=str(output_dir),
        per_device_train_batch_size=config.batch_size,
        num_train_epochs=config.num_epochs,
        learning_rate=config.learning_rate,
        warmup_steps=math.ceil(steps * config.warmup_ratio),
        weight_decay=config.weight_decay,
        seed=config.seed,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=max(1, steps // 10),
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


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path
) -> None:
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
