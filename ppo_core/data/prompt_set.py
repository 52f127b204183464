"""The prompts of a run, in their original form and as token ids."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.encode_prompts import encode_prompts
from ppo_core.data.prompts import (
    Prompt,
    Tokens,
    check_prompt_lengths,
    check_prompt_sizes,
    context_length,
    prompts_of,
    rows_of,
)
from ppo_core.data.reward_columns import AskedColumns, columns_of
from ppo_core.data.text_config import text_config
from ppo_core.errors import ConfigError, DataError

Collator = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one data set, in its order."""

    prompts: list[Prompt]
    """Original prompts: text, messages or token ids."""

    tokens: list[Tokens]
    """Token ids of each prompt, for the policy."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Columns of the prompts' rows that reward functions take."""

    def digest(self) -> str:
        """Return a short digest of all token ids and columns, in the prompts' order."""
        content = repr(self.tokens)
        if self.columns:
            content += json.dumps(self.columns, default=_as_json, skipkeys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def columns_at(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """Return the columns of the given rows."""
        return {name: [values[row] for row in rows] for name, values in self.columns.items()}

    def first(self, count: int) -> "PromptSet":
        """Return the set of the first `count` prompts."""
        columns = {name: values[:count] for name, values in self.columns.items()}
        return PromptSet(self.prompts[:count], self.tokens[:count], columns)

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.tokens)


@dataclass(frozen=True)
class RunPrompts:
    """The prompts of a run, and the policy's tokenizer, which encoded them."""

    tokenizer: PreTrainedTokenizerBase
    training: PromptSet
    evaluation: PromptSet | None
    """Prompts for evaluations and sample completions."""


def make_run_prompts(
    dataset: Any,
    eval_dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    config: PPOConfig,
    collator: Collator | None = None,
    asked: Sequence[AskedColumns] = (),
) -> RunPrompts:
    """Return the prompts of a run, made by `make_prompt_set`; `eval_dataset` may be None.

    Raises:
        ConfigError: the settings ask for evaluations, and there is no `eval_dataset`; or no prompt
            has a column that a reward function requires.
        DataError: a prompt cannot be used.
    """
    training = make_prompt_set(dataset, tokenizer, model, config, collator, asked)
    evaluation = None
    if eval_dataset is not None:
        evaluation = make_prompt_set(eval_dataset, tokenizer, model, config, collator, asked)
    elif config.eval_strategy != "no":
        raise ConfigError(
            f"eval_strategy={config.eval_strategy!r} needs an eval_dataset. Pass an "
            "eval_dataset, or set eval_strategy='no'."
        )
    return RunPrompts(tokenizer, training, evaluation)


def make_prompt_set(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    config: PPOConfig,
    collator: Collator | None = None,
    asked: Sequence[AskedColumns] = (),
) -> PromptSet:
    """Return the prompts of a data set, after checking that the policy `model` can answer them.

    A `collator` is called with one row at a time. It returns "input_ids" and optionally an
    "attention_mask", which marks padding with 0. `asked` describes the columns to keep for reward
    functions.

    Raises:
        ConfigError: no prompt has a column that a reward function requires.
        DataError: there is no prompt, or a prompt is empty or malformed, is too long to leave
            context for a response, or has a token without an embedding in the model.
    """
    rows = dataset
    if collator is not None:
        # Collate single rows, which get little padding; `prompts_of` removes it by the mask.
        rows = [dataset[number] for number in range(len(dataset))]
        dataset = [_collated(collator, row) for row in rows]
    elif asked and not isinstance(dataset, str | Mapping):
        # A generator can be read only once.
        rows = dataset = list(rows_of(dataset))
    prompts = prompts_of(dataset)
    columns = columns_of(rows, asked) if asked else {}
    context, response_length = context_length(model.config), config.response_length
    check_prompt_sizes(prompts, context=context, response_length=response_length)
    tokens = encode_prompts(tokenizer, prompts, num_proc=config.dataset_num_proc)
    check_prompt_lengths(tokens, context=context, response_length=response_length)
    _check_known(tokens, text_config(model.config).vocab_size)
    return PromptSet(prompts, tokens, columns)


def _as_json(value: Any) -> Any:
    """Return a form of a value that is JSON-serializable and equal in every process."""
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def _collated(collator: Collator, row: Any) -> dict[str, Tokens]:
    batch = collator([row])
    if "input_ids" not in batch:
        raise DataError(
            f"The data collator returned {', '.join(batch)}, but no input_ids, which must hold the "
            "prompt. Return input_ids from the data collator, or set data_collator=None."
        )
    names = [name for name in ("input_ids", "attention_mask") if name in batch]
    return {name: torch.as_tensor(batch[name])[0].tolist() for name in names}


def _check_known(prompts: Sequence[Tokens], vocabulary: int) -> None:
    """Raise if a prompt has a token without an embedding, for example an added padding token."""
    for number, tokens in enumerate(prompts):
        if (largest := max(tokens)) >= vocabulary:
            raise DataError(
                f"Prompt {number} has the token {largest}, but the policy has only {vocabulary} "
                "embeddings. Remove padding from the prompts, which need no padding, or resize the "
                "policy's embeddings."
            )
