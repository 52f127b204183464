"""Encode the rows of supervised fine-tuning as token ids and labels, and batch the examples."""

from collections.abc import Sequence
from typing import TypedDict

import pyarrow
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows
from ppo_core.data.chat_template import (
    Messages,
    encode_with_mask,
    has_generation_mask,
    is_messages,
    missing_end,
    render_chat,
)
from ppo_core.data.prompts import encode_prompt, encode_response
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.row_error import RowError
from ppo_core.errors import DataError
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


EXAMPLE_SCHEMA = pyarrow.schema(
    {
        "input_ids": pyarrow.list_(pyarrow.int32()),
        "labels": pyarrow.list_(pyarrow.int32()),
        "length": pyarrow.int32(),
    }
)
"""Types of an encoded example on disk; `length` is the number of tokens."""


def encode_example(
    tokenizer: PreTrainedTokenizerBase, row: Row, config: SupervisedConfig
) -> SFTExample:
    """Return token ids and labels of one row.

    The columns of the row determine which tokens count in the loss:
    - "messages": the turns of the assistant, each with the token that ends it;
    - "prompt" and "completion": the completion;
    - "text": all tokens.
    A chat template with a generation mask says itself which tokens are the assistant's. With
    completion_only_loss=False, all tokens of the row count.

    Raises:
        DataError: the chat template rejects the conversation, or renders the first messages
            differently when more messages follow.
        RowError: no token of the row counts.
    """
    return _with_labels(_segments(tokenizer, row, config), config)


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
    if "text" in row:
        text = encode_prompt(tokenizer, row["text"])
        return [(text + encode_response(tokenizer, "", end=end), True)]
    if "messages" in row:
        return _chat_segments(tokenizer, row["messages"], 0, end=end)
    prompt, completion = row["prompt"], row["completion"]
    if is_messages(prompt):
        answer = {"role": "assistant", "content": completion}
        return _chat_segments(tokenizer, [*prompt, answer], len(prompt), end=end)
    return [
        (encode_prompt(tokenizer, prompt), False),
        (encode_response(tokenizer, completion, end=end), True),
    ]


def _chat_segments(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int, *, end: bool
) -> Segments:
    """Split a conversation into segments; assistant turns from message `first` on count.

    An assistant segment starts after the chat template's generation prompt. So the tokens before
    the segment are exactly the prompt that PPO would sample a response to. The segment ends with
    the token that ends a turn, where PPO's response ends.
    """
    if has_generation_mask(tokenizer):
        return _masked_segments(tokenizer, messages, first)
    full = render_chat(tokenizer, messages, answer_follows=False)
    texts, done = [], 0
    for turn in range(first, len(messages)):
        if messages[turn]["role"] == "assistant":
            begin = _prefix_length(tokenizer, messages[:turn], full, answer_follows=True)
            close = _prefix_length(tokenizer, messages[: turn + 1], full, answer_follows=False)
            answer, marker, _ = full[begin:close].rpartition(str(tokenizer.eos_token))
            counted = begin + len(answer + marker) if marker else close
            texts += [(full[done:begin], False), (full[begin:counted], True)]
            done = counted
    texts.append((full[done:], False))
    segments = [(encode_response(tokenizer, text, end=False), counts) for text, counts in texts]
    if end and messages[-1]["role"] == "assistant":
        segments.append((missing_end(tokenizer, full), True))
    return segments


def _masked_segments(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int
) -> Segments:
    """Return one segment for each token, which counts where the template's mask says so."""
    ids, mask = encode_with_mask(tokenizer, messages)
    begin = len(encode_prompt(tokenizer, messages[:first])) if first else 0
    return [
        ([token], bool(counts) and number >= begin)
        for number, (token, counts) in enumerate(zip(ids, mask, strict=True))
    ]


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, full: str, *, answer_follows: bool
) -> int:
    prefix = render_chat(tokenizer, messages, answer_follows=answer_follows)
    if not full.startswith(prefix):
        raise DataError(
            f"the chat template renders the first {len(messages)} messages differently when more "
            "messages follow, so the assistant's turns cannot be located. Set a chat_template "
            "that only appends text for later messages, or set prompt_format to text."
        )
    return len(prefix)


def _with_labels(segments: Segments, config: SupervisedConfig) -> SFTExample:
    all_count = not config.completion_only_loss
    labels = [
        token if counts or all_count else IGNORED_LABEL for ids, counts in segments for token in ids
    ]
    if all(label == IGNORED_LABEL for label in labels):
        raise RowError(
            "without a token to learn",
            "Remove these rows, or set end_of_text to true if empty responses are intended.",
        )
    return {"input_ids": [token for ids, _ in segments for token in ids], "labels": labels}
