"""Encode the rows of supervised fine-tuning as token ids and labels, and batch the examples."""

from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows
from ppo_core.data.chat_template import Messages, is_messages, missing_end, render_chat
from ppo_core.data.prompts import encode_prompt, encode_response
from ppo_core.errors import DataError
from ppo_core.supervised.row_columns import (
    Row,
    as_messages,
    in_row,
    read_content,
    read_messages,
    read_text,
)
from ppo_core.supervised.supervised_config import SupervisedConfig

IGNORED_LABEL = -100
"""Label of a token that does not count in the loss; torch's cross entropy ignores this label."""

Segments = list[tuple[list[int], bool]]
"""Consecutive segments of a sequence: token ids, and whether these tokens count in the loss."""


class SFTExample(TypedDict):
    """Token ids and labels of one row."""

    input_ids: list[int]
    labels: list[int]
    """Label of each token: the token id if the token counts in the loss, else `IGNORED_LABEL`."""


def encode_example(
    tokenizer: PreTrainedTokenizerBase, row: Row, number: int, config: SupervisedConfig
) -> SFTExample:
    """Return token ids and labels of one row.

    The columns of the row determine which tokens count in the loss:
    - "messages": the assistant turns;
    - "prompt" and "completion", as text or messages: the completion;
    - "text": all tokens.
    With completion_only_loss=False, all tokens of the row count.

    Raises:
        DataError: a column is missing or has the wrong type, or no token of the row counts. Also
            if the chat template renders the first messages differently when more messages follow.
    """
    try:
        return _with_labels(_segments(tokenizer, row, config), config)
    except DataError as error:
        raise in_row(number, error) from error


def collate_examples(examples: Sequence[SFTExample]) -> dict[str, Tensor]:
    """Return a right-padded batch: input_ids, labels and attention_mask, each (B, S)."""
    input_ids, lengths = pad_rows([example["input_ids"] for example in examples])
    labels, _ = pad_rows([example["labels"] for example in examples])
    mask = length_mask(lengths, input_ids.shape[1])
    return {
        "input_ids": input_ids,
        "labels": labels.masked_fill(~mask, IGNORED_LABEL),
        "attention_mask": mask.long(),
    }


def _segments(tokenizer: PreTrainedTokenizerBase, row: Row, config: SupervisedConfig) -> Segments:
    end = config.end_of_text
    if "messages" in row:
        return _chat_segments(tokenizer, read_messages(row, "messages"), 0, end=end)
    if "prompt" in row or "completion" in row:
        prompt, completion = read_content(row, "prompt"), read_content(row, "completion")
        if is_messages(prompt):
            messages = [*prompt, *as_messages(completion)]
            return _chat_segments(tokenizer, messages, len(prompt), end=end)
        return [
            (encode_prompt(tokenizer, prompt), False),
            (encode_response(tokenizer, read_text(row, "completion"), end=end), True),
        ]
    if "text" not in row:
        raise DataError(
            f"the columns are {', '.join(map(str, row))}. An example needs 'text', or 'prompt' "
            "and 'completion', or 'messages'. Rename the columns of the data."
        )
    text = encode_prompt(tokenizer, read_text(row, "text"))
    return [(text + encode_response(tokenizer, "", end=end), True)]


def _chat_segments(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int, *, end: bool
) -> Segments:
    """Split a conversation into segments; assistant turns from message `first` on count.

    An assistant segment starts after the chat template's generation prompt. So the tokens before
    the segment are exactly the prompt that PPO would sample a response to.
    """
    full = render_chat(tokenizer, messages, answer_follows=False)
    texts, done = [], 0
    for turn in range(first, len(messages)):
        if messages[turn]["role"] == "assistant":
            begin = _prefix_length(tokenizer, messages[:turn], full, answer_follows=True)
            close = _prefix_length(tokenizer, messages[: turn + 1], full, answer_follows=False)
            texts += [(full[done:begin], False), (full[begin:close], True)]
            done = close
    texts.append((full[done:], False))
    segments = [(encode_response(tokenizer, text, end=False), counts) for text, counts in texts]
    if end and messages[-1]["role"] == "assistant":
        segments.append((missing_end(tokenizer, full), True))
    return segments


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, full: str, *, answer_follows: bool
) -> int:
    prefix = render_chat(tokenizer, messages, answer_follows=answer_follows)
    if not full.startswith(prefix):
        raise DataError(
            f"the chat template renders the first {len(messages)} messages differently when more "
            "messages follow, so the assistant's turns cannot be located. Set a chat_template "
            "that only appends text for later messages, or use 'prompt' and 'completion' as text."
        )
    return len(prefix)


def _with_labels(segments: Segments, config: SupervisedConfig) -> SFTExample:
    all_count = not config.completion_only_loss
    labels = [
        token if counts or all_count else IGNORED_LABEL for ids, counts in segments for token in ids
    ]
    if all(label == IGNORED_LABEL for label in labels):
        raise DataError(
            "there is no token to learn, because the completion is empty, or there is no assistant "
            "turn. Drop the row, or set end_of_text=True if an empty response is intended."
        )
    return {"input_ids": [token for ids, _ in segments for token in ids], "labels": labels}
