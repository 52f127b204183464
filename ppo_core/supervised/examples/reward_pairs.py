"""Encode preferences as pairs of token sequences, and batch the pairs.

A judgment of a single response becomes a pair in which one response is missing. The missing
response has the score 0.
"""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import pyarrow
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.data.batching import pad_rows
from ppo_core.data.encode_prompts import dialogue_segments
from ppo_core.data.rows.encoding import Encoding
from ppo_core.data.rows.row_columns import WEIGHT, Row
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.segments import EncodedSegment, Segment, joined
from ppo_core.supervised.supervised_config import SupervisedConfig


class RewardPair(TypedDict):
    """Token ids of a prompt with the chosen response, and with the rejected response.

    A missing response has no token ids.
    """

    chosen: list[int]
    rejected: list[int]
    margin: float
    """Margin by which the chosen score should exceed the rejected score."""
    weight: NotRequired[float]
    """Weight of the pair in the loss; 1 if it is missing."""


PAIR_SCHEMA = pyarrow.schema(
    {
        "chosen": pyarrow.list_(pyarrow.int32()),
        "rejected": pyarrow.list_(pyarrow.int32()),
        "margin": pyarrow.float64(),
        "length": pyarrow.int32(),
    }
)
"""Types of an encoded pair on disk; `length` counts the tokens of the longer sequence."""


def pair_encoding(
    tokenizer: PreTrainedTokenizerBase, config: SupervisedConfig
) -> Encoding[RewardPair]:
    """Return the encoding that converts a row to a `RewardPair`.

    Texts are encoded in the same way as by `encode_dialogue`, which later encodes the texts that
    the trained model scores. If a row has no margin, its pair has the margin 0. A row's weight, if
    it has one, is kept. One of the two responses may be None. A row cannot be used if prompt and
    response together have no token.
    """

    def sequences(row: Row) -> list[list[Segment]]:
        return [
            dialogue_segments(tokenizer, row["prompt"], row[side], end=config.end_of_text)
            if row[side] is not None
            else []
            for side in ("chosen", "rejected")
        ]

    return Encoding(
        sequences, _pair, length=lambda pair: max(len(pair["chosen"]), len(pair["rejected"]))
    )


def _pair(row: Row, sequences: Sequence[list[EncodedSegment]]) -> RewardPair:
    chosen, rejected = map(joined, sequences)
    if not (chosen or row["chosen"] is None) or not (rejected or row["rejected"] is None):
        raise RowError("without tokens", "Remove these rows, or set end_of_text to true.")
    pair: RewardPair = {
        "chosen": chosen,
        "rejected": rejected,
        "margin": row.get("margin") or 0.0,
    }
    if WEIGHT in row:
        pair["weight"] = row[WEIGHT]
    return pair


def collate_pairs(pairs: Sequence[RewardPair]) -> dict[str, Tensor]:
    """Return a right-padded batch: input_ids (B, 2, S), lengths (B, 2), margins (B,).

    In dimension 1, index 0 is the chosen response and index 1 the rejected response. If the pairs
    have weights, the batch has them too, as weights (B,). If a response is missing, the batch also
    has the key "given" (N,): indices of the existing sequences in `input_ids.flatten(0, 1)`.
    """
    input_ids, lengths = pad_rows(
        [ids for pair in pairs for ids in (pair["chosen"], pair["rejected"])]
    )
    batch = {
        "input_ids": input_ids.view(len(pairs), 2, -1),
        "lengths": lengths.view(len(pairs), 2),
        "margins": torch.tensor([pair["margin"] for pair in pairs]),
    }
    if WEIGHT in pairs[0]:
        batch["weights"] = torch.tensor([pair["weight"] for pair in pairs])
    if not lengths.all():
        batch["given"] = lengths.nonzero().squeeze(1)
    return batch
