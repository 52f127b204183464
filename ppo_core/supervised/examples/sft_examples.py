"""Encode the rows of supervised fine-tuning as token ids and labels, and batch the examples."""

import logging
from collections.abc import Sequence
from functools import cache
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
from ppo_core.data.encode_prompts import encode_prompt, prompt_segment, response_segments
from ppo_core.data.rows.encoding import Encoding
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.segments import EncodedSegment, Segment, joined
from ppo_core.errors import DataError
from ppo_core.supervised.supervised_config import SupervisedConfig

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
"""Label of a token that does not count in the loss; torch's cross entropy ignores this label."""


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


def example_encoding(
    tokenizer: PreTrainedTokenizerBase, config: SupervisedConfig
) -> Encoding[SFTExample]:
    """Return the encoding of rows as token ids and labels.

    The columns of the row determine which tokens count in the loss:
    - "messages": the turns of the assistant, including the token that ends a turn;
    - "prompt" and "completion": the completion;
    - "text": all tokens.
    If the chat template has a generation mask, the mask determines which tokens are the
    assistant's. With completion_only_loss=False, all tokens of the row count.

    Some chat templates, such as Qwen3's, render an answer differently when more messages follow.
    Such an answer is only context for the later answers; a warning says so.

    A row cannot be used if no token counts, or if the chat template rejects the conversation or
    renders the messages before the last answer differently when this answer follows.
    """

    def sequences(row: Row) -> list[list[Segment]]:
        return [_segments(tokenizer, row, config)]

    def build(row: Row, encoded: Sequence[list[EncodedSegment]]) -> SFTExample:
        return _with_labels(encoded[0], config)

    return Encoding(sequences, build, length=lambda example: len(example["input_ids"]))


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


def _segments(
    tokenizer: PreTrainedTokenizerBase, row: Row, config: SupervisedConfig
) -> list[Segment]:
    end = config.end_of_text
    if "text" in row:
        text = prompt_segment(tokenizer, row["text"])
        return [text, *([Segment(missing_end(tokenizer, row["text"]))] if end else [])]
    if "messages" in row:
        return _chat_segments(tokenizer, row["messages"], 0, end=end)
    prompt, completion = row["prompt"], row["completion"]
    if is_messages(prompt):
        answer = {"role": "assistant", "content": completion}
        return _chat_segments(tokenizer, [*prompt, answer], len(prompt), end=end)
    return [
        prompt_segment(tokenizer, prompt)._replace(counts=False),
        *response_segments(tokenizer, completion, end=end),
    ]


def _chat_segments(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int, *, end: bool
) -> list[Segment]:
    """Split a conversation into segments; assistant turns from message `first` on are counted.

    With `end`, append the end-of-sequence token if the last turn is the assistant's and lacks the
    token.
    """
    full = render_chat(tokenizer, messages, answer_follows=False)
    if has_generation_mask(tokenizer):
        segments = _masked_segments(tokenizer, messages, first)
    else:
        segments = _located_segments(tokenizer, messages, first, full)
    if end and messages[-1]["role"] == "assistant":
        segments.append(Segment(missing_end(tokenizer, full)))
    return segments


def _located_segments(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int, full: str
) -> list[Segment]:
    """Locate the turns of the assistant in `full`, the text of the conversation.

    An assistant segment starts after the chat template's generation prompt. So the tokens before
    the segment are exactly the prompt that PPO would sample a response to. The segment ends with
    the token that ends a turn, as a response in PPO does, or with the turn if there is no such
    token. A turn that the template renders differently later is left out, unless it is the last.
    """
    segments, done = [], 0
    turns = [turn for turn in range(first, len(messages)) if messages[turn]["role"] == "assistant"]
    for turn in turns:
        begin = _prefix_length(tokenizer, messages[:turn], full, answer_follows=True)
        close = _prefix_length(tokenizer, messages[: turn + 1], full, answer_follows=False)
        if begin is None or close is None:
            if turn == turns[-1]:
                raise DataError(
                    "the chat template renders the messages before the last answer, or the answer "
                    "itself, differently in the whole conversation, so the answer cannot be "
                    "located. Set a chat_template that only appends text for later messages."
                )
            _warn_of_changes(tokenizer.name_or_path)
            continue
        end = tokenizer.eos_token or ""
        last = full.rfind(end, begin, close)
        counted = close if last < 0 else last + len(end)
        segments += [Segment(full[done:begin], counts=False), Segment(full[begin:counted])]
        done = counted
    return [*segments, Segment(full[done:], counts=False)]


@cache
def _warn_of_changes(tokenizer: str) -> None:
    logger.warning(
        "The chat template of '%s' renders an answer differently when more messages follow. Of "
        "such a conversation, SFT learns only the last answer. To learn all answers, write one row "
        "for each answer, with the messages before it as prompt.",
        tokenizer,
    )


def _masked_segments(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int
) -> list[Segment]:
    """Return one segment for each token.

    A token counts if the template's mask includes it and it is not in the first `first` messages.
    """
    ids, mask = encode_with_mask(tokenizer, messages)
    begin = len(encode_prompt(tokenizer, messages[:first])) if first else 0
    return [
        Segment([token], counts=bool(counts) and number >= begin)
        for number, (token, counts) in enumerate(zip(ids, mask, strict=True))
    ]


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, full: str, *, answer_follows: bool
) -> int | None:
    """Return the length of the first messages as text; None if `full` does not begin with it."""
    prefix = render_chat(tokenizer, messages, answer_follows=answer_follows)
    return len(prefix) if full.startswith(prefix) else None


def _with_labels(segments: list[EncodedSegment], config: SupervisedConfig) -> SFTExample:
    all_count = not config.completion_only_loss
    labels = [
        token if counts or all_count else IGNORED_LABEL for ids, counts in segments for token in ids
    ]
    # The first token has no context, so the loss never counts it.
    if all(label == IGNORED_LABEL for label in labels[1:]):
        raise RowError(
            "without a token to learn",
            "Remove these rows, or set end_of_text to true if empty responses are intended.",
        )
    return {"input_ids": joined(segments), "labels": labels}
