"""Encode preferences as pairs of token sequences, and batch the pairs."""

from collections.abc import Sequence
from typing import TypedDict

import pyarrow
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.data.batching import pad_rows
from ppo_core.data.prompts import encode_dialogue
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.row_error import RowError
from ppo_core.supervised.supervised_config import SupervisedConfig


class RewardPair(TypedDict):
    """Token ids of a prompt with the chosen response, and with the rejected response."""

    chosen: list[int]
    rejected: list[int]
    margin: float
    """Margin by which the chosen score should exceed the rejected score."""


PAIR_SCHEMA = pyarrow.schema(
    {
        "chosen": pyarrow.list_(pyarrow.int32()),
        "rejected": pyarrow.list_(pyarrow.int32()),
        "margin": pyarrow.float64(),
        "length": pyarrow.int32(),
    }
)
"""Types of an encoded pair on disk; `length` is that of the longer sequence."""


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, row: Row, config: SupervisedConfig
) -> RewardPair:
    """Return token ids of the prompt with the chosen and the rejected response, and the margin.

    Texts are encoded by `encode_dialogue`, as when the trained model scores. The margin is 0 if the
    row has none.

    Raises:
        DataError: the chat template rejects a conversation.
        RowError: a text has no token.
    """
    chosen, rejected = (
        encode_dialogue(tokenizer, row["prompt"], row[side], end=config.end_of_text)
        for side in ("chosen", "rejected")
    )
    if not (chosen and rejected):
        raise RowError("without tokens", "Remove these rows, or set end_of_text to true.")
    return {"chosen": chosen, "rejected": rejected, "margin": row.get("margin") or 0.0}


def pair_length(pair: RewardPair) -> int:
    """Return the number of tokens of the longer sequence."""
    return max(len(pair["chosen"]), len(pair["rejected"]))


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
