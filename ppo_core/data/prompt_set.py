"""The prompts of a run, as the data set has them and as token ids."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompts import (
    Prompt,
    Tokens,
    check_prompt_lengths,
    context_length,
    encode_prompts,
    prompts_of,
)
from ppo_core.errors import DataError

Collator = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class PromptSet:
    """Prompts, row by row."""

    prompts: list[Prompt]
    """As they were given: text, messages or token ids."""

    tokens: list[Tokens]
    """The policy's token ids."""

    def digest(self) -> str:
        """A short digest of the tokens, in their order."""
        return hashlib.sha256(repr(self.tokens).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.tokens)


def make_prompt_set(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    config: PPOConfig,
    collator: Collator | None = None,
) -> PromptSet:
    """The prompts of a data set, checked against the model that is to answer them.

    A `collator` gets one row at a time, and gives its "input_ids" and what of them is padding,
    its "attention_mask", if any is.

    Raises:
        DataError: there is no prompt, one leaves no room for a response, or one has a token
            that the model does not know.
    """
    if collator is not None:
        # Row by row the collator has little to fill up; the mask says what.
        dataset = [_collated(collator, dataset[number]) for number in range(len(dataset))]
    prompts = prompts_of(dataset)
    tokens = encode_prompts(tokenizer, prompts, num_proc=config.dataset_num_proc)
    check_prompt_lengths(
        tokens, context=context_length(model.config), response_length=config.response_length
    )
    _check_known(tokens, model.config.get_text_config().vocab_size)
    return PromptSet(prompts, tokens)


def _collated(collator: Collator, row: Any) -> dict[str, Tokens]:
    batch = collator([row])
    if "input_ids" not in batch:
        raise DataError(
            f"The data collator gave {', '.join(batch)}, and no input_ids: there is no prompt. "
            "Return input_ids, or leave data_collator=None."
        )
    names = [name for name in ("input_ids", "attention_mask") if name in batch]
    return {name: torch.as_tensor(batch[name])[0].tolist() for name in names}


def _check_known(prompts: Sequence[Tokens], vocabulary: int) -> None:
    """A pad token that was added to the tokenizer has no embedding, and none is needed."""
    for number, tokens in enumerate(prompts):
        if (largest := max(tokens)) >= vocabulary:
            raise DataError(
                f"Prompt {number} has the token {largest}, and the policy has embeddings for "
                f"{vocabulary}. Leave the padding away (prompts are never padded here), or resize "
                "the embeddings."
            )
