"""Encode the rows of reward-model training as pairs of token sequences, and batch the pairs."""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.data.batching import pad_rows
from ppo_core.data.chat_template import Messages, encode_chat, is_messages
from ppo_core.data.prompts import encode_dialogue
from ppo_core.errors import DataError
from ppo_core.supervised.row_columns import Row, as_messages, in_row, read_content, read_number
from ppo_core.supervised.supervised_config import SupervisedConfig


class RewardPair(TypedDict):
    """Token ids of a prompt with the chosen response, and with the rejected response."""

    chosen: list[int]
    rejected: list[int]
    margin: float
    """Margin by which the chosen score should exceed the rejected score."""


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, row: Row, number: int, config: SupervisedConfig
) -> RewardPair:
    """Return token ids of the prompt with the chosen and the rejected response, and the margin.

    Texts are encoded by `encode_dialogue`, as when the trained model scores. In a row without
    "prompt", "chosen" and "rejected" are full texts, or conversations that begin with the same
    messages. The margin is 0 without the column "margin".

    Raises:
        DataError: a column is missing or has the wrong type, a text has no token, or two
            conversations without "prompt" differ in their first message.
    """
    try:
        if "prompt" not in row:
            _require_one_prompt(read_content(row, "chosen"), read_content(row, "rejected"))
        chosen, rejected = (
            _encode_side(tokenizer, row, side, end=config.end_of_text)
            for side in ("chosen", "rejected")
        )
        if not (chosen and rejected):
            raise DataError("a text has no tokens. Drop the row, or set end_of_text=True.")
        margin = read_number(row, "margin") if "margin" in row else 0.0
        return {"chosen": chosen, "rejected": rejected, "margin": margin}
    except DataError as error:
        raise in_row(number, error) from error


def collate_pairs(pairs: Sequence[RewardPair]) -> dict[str, Tensor]:
    """Return a right-padded batch: input_ids (B, 2, S), lengths (B, 2), margins (B,).

    In dimension 1, index 0 is the chosen response and index 1 the rejected response.
    """
    input_ids, lengths = pad_rows(
        [ids for pair in pairs for ids in (pair["chosen"], pair["rejected"])]
    )
    return {
        "input_ids": input_ids.view(len(pairs), 2, -1),
        "lengths": lengths.view(len(pairs), 2),
        "margins": torch.tensor([pair["margin"] for pair in pairs]),
    }


def _require_one_prompt(chosen: str | Messages, rejected: str | Messages) -> None:
    """Raise DataError if the columns differ in type, or conversations in the first message."""
    if is_messages(chosen) != is_messages(rejected):
        raise DataError(
            "one of 'chosen' and 'rejected' is text, but the other is messages. Convert one of "
            "the two columns."
        )
    if is_messages(chosen) and chosen[0] != rejected[0]:
        raise DataError(
            "there is no 'prompt', and 'chosen' and 'rejected' begin with different messages, so "
            "they answer different prompts. Add a column 'prompt', or drop the row."
        )


def _encode_side(
    tokenizer: PreTrainedTokenizerBase, row: Row, side: str, *, end: bool
) -> list[int]:
    response = read_content(row, side)
    prompt = read_content(row, "prompt") if "prompt" in row else ""
    if is_messages(prompt):
        return encode_chat(tokenizer, [*prompt, *as_messages(response)], end=end)
    if isinstance(response, str):
        return encode_dialogue(tokenizer, prompt, response, end=end)
    if "prompt" in row:
        raise DataError(
            f"'prompt' is text, but '{side}' is messages. Drop the column 'prompt' if the messages "
            "include the prompt, or convert 'prompt' to messages."
        )
    return encode_chat(tokenizer, response, end=end)
