"""Rows of text or chat as token ids and labels, and batches of them, for supervised training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows
from ppo_core.data.chat_template import Messages, encode_chat, is_messages, missing_end, render_chat
from ppo_core.data.prompts import encode_dialogue, encode_prompt, encode_response
from ppo_core.errors import DataError
from ppo_core.supervised.config import SupervisedConfig

Row = Mapping[str, Any]

IGNORED_LABEL = -100
"""Target of a token that does not count in the loss; torch's own convention."""


class Example(TypedDict):
    """One example of SFT."""

    input_ids: list[int]
    labels: list[int]
    """The token ids that count, `IGNORED_LABEL` in the place of the others."""


class Pair(TypedDict):
    """Two responses to one prompt, joined with it."""

    chosen: list[int]
    rejected: list[int]
    margin: float
    """By how much the chosen score is to exceed the rejected one."""


# --- Examples of SFT -------------------------------------------------------------


def encode_example(
    tokenizer: PreTrainedTokenizerBase, row: Row, number: int, config: SupervisedConfig
) -> Example:
    """Token ids and labels of one row.

    The row has "messages", of which every turn of the assistant counts; or "prompt" and
    "completion", each text or messages, of which the completion counts; or "text", which counts
    as a whole. With completion_only_loss=False everything counts.

    Raises:
        DataError: a column is missing or of another kind, the row has nothing to learn, or the
            chat template renders the beginning of a conversation otherwise than the whole.
    """
    try:
        return _joined(_counted_pieces(tokenizer, row, config), config)
    except DataError as error:
        raise _in_row(number, error) from error


Pieces = list[tuple[list[int], bool]]
"""Token ids in order, and whether they count."""


def _counted_pieces(
    tokenizer: PreTrainedTokenizerBase, row: Row, config: SupervisedConfig
) -> Pieces:
    end = config.end_of_text
    if "messages" in row:
        return _chat_pieces(tokenizer, _messages(row, "messages"), 0, end=end)
    if "prompt" in row or "completion" in row:
        prompt, completion = _content(row, "prompt"), _content(row, "completion")
        if is_messages(prompt):
            messages = [*prompt, *_as_answer(completion)]
            return _chat_pieces(tokenizer, messages, len(prompt), end=end)
        return [
            (encode_prompt(tokenizer, prompt), False),
            (encode_response(tokenizer, _text(row, "completion"), end=end), True),
        ]
    if "text" not in row:
        raise DataError(
            f"the columns are {', '.join(map(str, row))}, but an example has 'text', or 'prompt' "
            "and 'completion', or 'messages'. Rename the columns in the data."
        )
    text = encode_prompt(tokenizer, _text(row, "text"))
    return [(text + encode_response(tokenizer, "", end=end), True)]


def _chat_pieces(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int, *, end: bool
) -> Pieces:
    """A conversation cut where the assistant's turns begin and end; those from `first` on count.

    A turn begins behind what the template puts in front of an answer, so that it is learnt
    as the answer to the very prompt that PPO will sample from.
    """
    whole = render_chat(tokenizer, messages, answer_follows=False)
    texts, done = [], 0
    for turn in range(first, len(messages)):
        if messages[turn]["role"] == "assistant":
            begin = _prefix_length(tokenizer, messages[:turn], whole, answer_follows=True)
            close = _prefix_length(tokenizer, messages[: turn + 1], whole, answer_follows=False)
            texts += [(whole[done:begin], False), (whole[begin:close], True)]
            done = close
    texts.append((whole[done:], False))
    pieces = [(encode_response(tokenizer, text, end=False), counts) for text, counts in texts]
    if end and messages[-1]["role"] == "assistant":
        pieces.append((missing_end(tokenizer, whole), True))
    return pieces


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, whole: str, *, answer_follows: bool
) -> int:
    prefix = render_chat(tokenizer, messages, answer_follows=answer_follows)
    if not whole.startswith(prefix):
        raise DataError(
            f"the chat template renders the first {len(messages)} messages otherwise when others "
            "follow, so nothing tells where the assistant's turn lies. Set a chat_template that "
            "only adds to what stands, or give 'prompt' and 'completion' as text."
        )
    return len(prefix)


def _joined(pieces: Pieces, config: SupervisedConfig) -> Example:
    everything = not config.completion_only_loss
    labels = [
        token if counts or everything else IGNORED_LABEL for ids, counts in pieces for token in ids
    ]
    if all(label == IGNORED_LABEL for label in labels):
        raise DataError(
            "there is no token to learn: the completion is empty, or no turn is the assistant's. "
            "Drop the row, or set end_of_text=True if an empty answer is meant."
        )
    return {"input_ids": [token for ids, _ in pieces for token in ids], "labels": labels}


# --- Pairs of a reward model -----------------------------------------------------


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, row: Row, number: int, config: SupervisedConfig
) -> Pair:
    """Token ids of the prompt with the chosen, and with the rejected response, and the margin.

    Encoded as `encode_dialogue` does when the model scores. Texts without "prompt" are scored
    as they are. Of messages without "prompt", those that both responses begin with are the
    prompt. Without "margin" it is 0.

    Raises:
        DataError: a column is missing or of another kind, or two conversations without "prompt"
            have no message in common.
    """
    try:
        if "prompt" not in row:
            _require_one_prompt(_content(row, "chosen"), _content(row, "rejected"))
        chosen, rejected = (
            _whole_dialogue(tokenizer, row, side, end=config.end_of_text)
            for side in ("chosen", "rejected")
        )
        if not (chosen and rejected):
            raise DataError("a text has no token at all. Drop the row, or set end_of_text=True.")
        margin = _number(row, "margin") if "margin" in row else 0.0
        return {"chosen": chosen, "rejected": rejected, "margin": margin}
    except DataError as error:
        raise _in_row(number, error) from error


def _require_one_prompt(chosen: str | Messages, rejected: str | Messages) -> None:
    """Refuse conversations that answer different prompts."""
    if is_messages(chosen) != is_messages(rejected):
        raise DataError("one of 'chosen' and 'rejected' is text, the other messages. Convert one.")
    if is_messages(chosen) and chosen[0] != rejected[0]:
        raise DataError(
            "there is no 'prompt', and 'chosen' and 'rejected' have no first message in common, so "
            "they answer different prompts. Add a column 'prompt', or drop the row."
        )


def _whole_dialogue(
    tokenizer: PreTrainedTokenizerBase, row: Row, side: str, *, end: bool
) -> list[int]:
    response = _content(row, side)
    prompt = _content(row, "prompt") if "prompt" in row else ""
    if is_messages(prompt):
        return encode_chat(tokenizer, [*prompt, *_as_answer(response)], end=end)
    if isinstance(response, str):
        return encode_dialogue(tokenizer, prompt, response, end=end)
    if "prompt" in row:
        raise DataError(
            f"'prompt' is text and '{side}' is messages. Drop the column 'prompt' if the messages "
            "begin with it, or make messages of it."
        )
    return encode_chat(tokenizer, response, end=end)


# --- Columns ---------------------------------------------------------------------


def _content(row: Row, name: str) -> str | Messages:
    """A column that holds text or messages."""
    value = _column(row, name)
    if isinstance(value, str) or is_messages(value):
        return value
    raise DataError(
        f"'{name}' is {type(value).__name__}, not text or messages: {value!r:.80}. "
        "Convert or drop the row."
    )


def _text(row: Row, name: str) -> str:
    value = _column(row, name)
    if isinstance(value, str):
        return value
    raise DataError(
        f"'{name}' is {type(value).__name__}, not text: {value!r:.80}. Convert or drop the row."
    )


def _messages(row: Row, name: str) -> Messages:
    value = _column(row, name)
    if is_messages(value):
        return value
    raise DataError(
        f"'{name}' is {type(value).__name__}, not a list of messages: {value!r:.80}. "
        "Convert or drop the row."
    )


def _number(row: Row, name: str) -> float:
    value = _column(row, name)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise DataError(f"'{name}' is {value!r:.80}, not a finite number. Mend or drop the row.")


def _column(row: Row, name: str) -> object:
    if name not in row:
        raise DataError(
            f"there is no column '{name}'; it has: {', '.join(map(str, row))}. "
            "Rename the column in the data."
        )
    return row[name]


def _as_answer(response: str | Messages) -> Messages:
    return [{"role": "assistant", "content": response}] if isinstance(response, str) else response


def _in_row(number: int, error: DataError) -> DataError:
    return DataError(f"Row {number}: {error}")


# --- Batches ---------------------------------------------------------------------


def collate_examples(rows: Sequence[Example]) -> dict[str, Tensor]:
    """Padded on the right: input_ids, labels and attention_mask, each (B, S)."""
    input_ids, lengths = pad_rows([row["input_ids"] for row in rows])
    labels, _ = pad_rows([row["labels"] for row in rows])
    counted = length_mask(lengths, input_ids.shape[1])
    return {
        "input_ids": input_ids,
        "labels": labels.masked_fill(~counted, IGNORED_LABEL),
        "attention_mask": counted.long(),
    }


def collate_pairs(rows: Sequence[Pair]) -> dict[str, Tensor]:
    """Padded on the right: input_ids (B, 2, S) and lengths (B, 2), chosen first; margins (B,)."""
    input_ids, lengths = pad_rows([ids for row in rows for ids in (row["chosen"], row["rejected"])])
    return {
        "input_ids": input_ids.view(len(rows), 2, -1),
        "lengths": lengths.view(len(rows), 2),
        "margins": torch.tensor([row["margin"] for row in rows]),
    }
