"""Encode prompts, responses and dialogues as token ids, and decode them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from transformers import PreTrainedTokenizerBase

from ppo_core.data.chat_template import (
    Messages,
    chat_segments,
    is_messages,
    missing_end,
    render_chat,
)
from ppo_core.data.prompts import Prompt, Tokens, plain_ids
from ppo_core.data.segments import Segment, encode_sequence, encode_sequences, joined
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE
from ppo_core.data.types import Rollout
from ppo_core.errors import DataError, library_errors


def prompt_segment(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Segment:
    """Return a prompt as a segment, see `encode_prompt`.

    Raises:
        DataError: see `encode_prompt`.
    """
    if isinstance(prompt, str):
        return Segment(_checked_text(prompt), has_start=True)
    if is_messages(prompt):
        return Segment(_checked_text(render_chat(tokenizer, prompt, answer_follows=True)))
    return Segment(_checked_ids(tokenizer, plain_ids(prompt)))


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"The prompt has {text[error.start]!a}, half of a surrogate pair, which is not a "
            "character. Correct or remove the prompt."
        ) from error
    return text


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Tokens:
    """Return the token ids of a prompt, without an added end-of-sequence token.

    Text is encoded with the tokenizer's start tokens. Messages are rendered by the tokenizer's
    chat template up to the start of the assistant's response. Token ids are returned as a list.

    Raises:
        DataError: the prompt is neither text, nor messages, nor token ids; an id is outside the
            vocabulary; messages cannot be rendered; or a text has half of a surrogate pair.
    """
    return encode_sequence(tokenizer, [prompt_segment(tokenizer, prompt)])


def _checked_ids(tokenizer: PreTrainedTokenizerBase, ids: object) -> Tokens:
    # Refuse bytes, although the items of bytes are integers, too.
    if (
        not isinstance(ids, Sequence)
        or isinstance(ids, bytes | bytearray)
        or not all(isinstance(token, Integral) for token in ids)
    ):
        raise DataError(
            f"A prompt is text, chat messages or token ids, not {type(ids).__name__}: "
            f"{ids!r:.80}. Convert or remove the prompt."
        )
    size = len(tokenizer)
    unknown = next((token for token in ids if not 0 <= token < size), None)
    if unknown is not None:
        raise DataError(
            f"A prompt has the token id {unknown}, but the tokenizer has only {size} tokens, so "
            "another tokenizer encoded the prompt. Encode the prompts again, or give text."
        )
    return [int(token) for token in ids]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], num_proc: int | None = None
) -> list[Tokens]:
    """Return the token ids of many prompts, encoded by `num_proc` processes.

    Raises:
        DataError: a prompt cannot be encoded, see `encode_prompt`; the message names the row,
            unless the tokenizer itself fails.
    """
    if not len(prompts) or num_proc in (None, 1):
        encoded: list[Tokens] = []
        while batch := prompts[len(encoded) : len(encoded) + ROWS_AT_ONCE]:
            encoded += _encode_batch(tokenizer, batch, len(encoded))
        return encoded
    from datasets import Dataset

    # Write prompts as JSON, because an Arrow column has a single type and adds keys to messages.
    rows = Dataset.from_dict(
        {"prompt": [json.dumps(prompt, default=plain_ids) for prompt in prompts]}
    )
    by_processes = rows.map(
        _encode_json,
        with_indices=True,
        batched=True,
        batch_size=ROWS_AT_ONCE,
        fn_kwargs={"tokenizer": tokenizer},
        num_proc=num_proc,
    )
    return list(by_processes["input_ids"])


def _encode_json(
    columns: Mapping[str, list[str]], rows: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Tokens]]:
    prompts = [json.loads(prompt) for prompt in columns["prompt"]]
    return {"input_ids": _encode_batch(tokenizer, prompts, rows[0])}


def _encode_batch(
    tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], first: int
) -> list[Tokens]:
    """Encode consecutive prompts; `first` is the row number of the first prompt."""
    sequences = []
    for row, prompt in enumerate(prompts, first):
        try:
            sequences.append([prompt_segment(tokenizer, prompt)])
        except DataError as error:
            raise DataError(f"Row {row}: {error}") from error
    return list(map(joined, encode_sequences(tokenizer, sequences)))


def response_segments(tokenizer: PreTrainedTokenizerBase, text: str, *, end: bool) -> list[Segment]:
    """Return a response as segments; `end` appends a missing end-of-sequence token.

    Supervised training, validation and scoring all encode prompt and response separately and then
    concatenate the ids, so that all of them use identical tokens (TRL #1702).

    Raises:
        DataError: `end` is True and the tokenizer has no end-of-sequence token.
    """
    return [Segment(text), Segment(missing_end(tokenizer, text))] if end else [Segment(text)]


def dialogue_segments(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, response: str, *, end: bool
) -> list[Segment]:
    """Return a prompt and its response as segments, see `encode_dialogue`.

    Raises:
        DataError: see `encode_dialogue`.
    """
    if is_messages(prompt):
        reply = {"role": "assistant", "content": response}
        return chat_segments(tokenizer, [*prompt, reply], end=end)
    if not isinstance(prompt, str):
        raise DataError(
            f"A reward model reads text or messages, but the prompt is {prompt!r:.80}. Decode "
            "token ids with the tokenizer that encoded the prompt."
        )
    return [prompt_segment(tokenizer, prompt), *response_segments(tokenizer, response, end=end)]


def encode_dialogue(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, response: str, *, end: bool
) -> Tokens:
    """Return the token ids of a prompt and its response, for a reward model.

    A text prompt and the response are encoded separately and concatenated. A prompt of messages is
    rendered by the chat template, with the response as the assistant's turn. If `end`, the ids end
    in an end-of-sequence token.

    Raises:
        DataError: the prompt is token ids, which another tokenizer may have encoded; messages
            cannot be rendered; or `end` is True and the tokenizer has no end-of-sequence token.
    """
    return encode_sequence(tokenizer, dialogue_segments(tokenizer, prompt, response, end=end))


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Return the text of a prompt, for tables and reward functions.

    Messages are rendered by the chat template; token ids are decoded without special tokens.
    """
    if isinstance(prompt, str):
        return prompt
    if is_messages(prompt):
        return render_chat(tokenizer, prompt, answer_follows=True)
    return _decode(tokenizer, _checked_ids(tokenizer, plain_ids(prompt)))


def response_text(tokenizer: PreTrainedTokenizerBase, prompt: Tokens, response: Tokens) -> str:
    """Return the text that a response adds to its prompt, without special tokens.

    Some tokenizers drop a leading space when a response is decoded alone. Decoding the prompt and
    the response as one sequence keeps the space.
    """
    prefix = _decode(tokenizer, prompt)
    full = _decode(tokenizer, [*prompt, *response])
    if full.startswith(prefix):
        return full[len(prefix) :]
    return _decode(tokenizer, response)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Tokens) -> str:
    failure = f"The tokenizer of '{tokenizer.name_or_path}' cannot decode {len(ids)} tokens"
    with library_errors(DataError, failure, "Use another tokenizer."):
        return str(tokenizer.decode(ids, skip_special_tokens=True))


def response_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """Return the text of each response of a rollout, without the stop token."""
    return [
        response_text(tokenizer, prompt[:prompt_length], response[:response_length])
        for prompt, prompt_length, response, response_length in zip(
            rollout.prompt_ids.tolist(),
            rollout.prompt_lengths.tolist(),
            rollout.response_ids.tolist(),
            (rollout.response_lengths - rollout.has_stop.long()).tolist(),
            strict=True,
        )
    ]
