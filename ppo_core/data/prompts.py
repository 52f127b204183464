"""Read prompts from data sets; encode, decode and check prompts, and draw them at random."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from ppo_core.data.chat_template import Messages, chat_segments, is_messages, render_chat
from ppo_core.data.segments import Segment, encode_sequence, encode_sequences, joined
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE
from ppo_core.data.text_config import text_config
from ppo_core.data.types import Rollout
from ppo_core.errors import DataError, library_errors

Tokens = list[int]

Prompt: TypeAlias = str | Messages | Sequence[int]
"""Text, chat messages, or token ids of the policy's tokenizer (as list, array or tensor)."""

CHARACTERS_PER_TOKEN = 128
"""Assumed maximum characters of a token; published tokenizers exceed it only in runs of spaces."""

MIN_CHARACTERS = 100_000
"""A text of at most this many characters is encoded even if the limit on tokens is small."""

MAX_CHARACTERS = 16_000_000
"""Maximum characters of a text for a model whose context has no limit."""

PROMPT_COLUMNS = ("input_ids", "prompt", "messages", "query")
"""Columns that may hold the prompt; the first column with a value is used."""


# --- From data sets to prompts -----------------------------------------------------


def prompts_of(dataset: Iterable[Any]) -> list[Prompt]:
    """Return the prompts of a `datasets.Dataset`, a list of rows, or a list of prompts.

    A row is a mapping with one of `PROMPT_COLUMNS`. In "input_ids", padding is removed where
    "attention_mask" is 0. In "messages", a final message of the assistant is removed.

    Raises:
        DataError: the data set is a text or a mapping; or a row has no value in `PROMPT_COLUMNS`,
            has an empty prompt, or has an "attention_mask" of another length than "input_ids".
    """
    if isinstance(dataset, Mapping):
        raise DataError(
            f"The prompts are a mapping of {', '.join(map(str, dataset))}, not a single data set. "
            "Choose a split, for example dataset['train']."
        )
    if isinstance(dataset, str):
        raise DataError(
            f"The prompts are a single text, {dataset!r:.80}, not a data set. Load the data set "
            "first, or put the text into a list."
        )
    return [
        _prompt_of_row(item, row) if isinstance(item, Mapping) else item
        for row, item in enumerate(rows_of(dataset))
    ]


def rows_of(dataset: Any) -> Iterable[Any]:
    """Return the items of a data set, which are rows or prompts."""
    if hasattr(dataset, "__iter__"):
        rows: Iterable[Any] = dataset
        return rows
    # A data set of torch may return a row for any index, so plain iteration might never end.
    return (dataset[row] for row in range(len(dataset)))


def _prompt_of_row(columns: Mapping[str, Any], row: int) -> Prompt:
    name = next((name for name in PROMPT_COLUMNS if columns.get(name) is not None), None)
    if name is None:
        raise DataError(
            f"Row {row} has no prompt: it has the columns {', '.join(map(str, columns))}, but no "
            f"value in any of {', '.join(PROMPT_COLUMNS)}. Rename a column or remove the row."
        )
    prompt: Prompt = columns[name]
    if isinstance(prompt, str) and not prompt.strip():
        raise DataError(
            f"Row {row} has an empty prompt: {name}={prompt!r:.80}. Remove the row, or write a "
            "prompt."
        )
    if name == "input_ids" and columns.get("attention_mask") is not None:
        return _without_padding(_plain(prompt), _plain(columns["attention_mask"]), row)
    if name == "messages" and is_messages(prompt) and prompt[-1].get("role") == "assistant":
        return prompt[:-1]
    return prompt


def _without_padding(ids: Tokens, mask: Sequence[int], row: int) -> Tokens:
    if len(ids) != len(mask):
        raise DataError(
            f"Row {row} has {len(ids)} input_ids, but an attention_mask of length {len(mask)}. "
            "Tokenize the row again, so that both lengths are equal."
        )
    return [token for token, visible in zip(ids, mask, strict=True) if visible]


def _plain(ids: Any) -> Any:
    """Return an array or a tensor as a list, and any other value unchanged."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


# --- From prompts and responses to token ids ---------------------------------------


def prompt_segment(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Segment:
    """Return a prompt as a segment, see `encode_prompt`.

    Raises:
        DataError: see `encode_prompt`.
    """
    if isinstance(prompt, str):
        return Segment(_checked_text(prompt), has_start=True)
    if is_messages(prompt):
        return Segment(_checked_text(render_chat(tokenizer, prompt, answer_follows=True)))
    return Segment(_checked_ids(tokenizer, _plain(prompt)))


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
    rows = Dataset.from_dict({"prompt": [json.dumps(prompt, default=_plain) for prompt in prompts]})
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
    """Return a response as segments; `end` appends the end-of-sequence token.

    Supervised training, validation and scoring all encode prompt and response separately and then
    concatenate the ids, so that all of them use identical tokens (TRL #1702).

    Raises:
        DataError: `end` is True and the tokenizer has no end-of-sequence token.
    """
    if not end:
        return [Segment(text)]
    if tokenizer.eos_token_id is None:
        raise DataError(
            "The tokenizer has no end-of-sequence token, which must end a response. Set the "
            "tokenizer's eos_token."
        )
    return [Segment(text), Segment([tokenizer.eos_token_id])]


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


# --- From token ids to text --------------------------------------------------------


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Return the text of a prompt, for tables and reward functions.

    Messages are rendered by the chat template; token ids are decoded without special tokens.
    """
    if isinstance(prompt, str):
        return prompt
    if is_messages(prompt):
        return render_chat(tokenizer, prompt, answer_follows=True)
    return _decode(tokenizer, _checked_ids(tokenizer, _plain(prompt)))


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


# --- Checking and drawing prompts --------------------------------------------------


def context_length(config: Any) -> int | None:
    """Return the maximum sequence length of a model, or None if its configuration has no limit."""
    length = getattr(text_config(config), "max_position_embeddings", None)
    # XLNet has a length of -1.
    return None if length is None or length < 0 else int(length)


def max_characters(limit: int | None) -> int:
    """Return the maximum characters of a text; a longer text would have over `limit` tokens.

    If `limit` is None, the maximum is `MAX_CHARACTERS`.
    """
    return MAX_CHARACTERS if limit is None else max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * limit)


def count_characters(content: object) -> int:
    """Return the number of characters of a text or of messages; 0 for anything else."""
    if isinstance(content, str):
        return len(content)
    if is_messages(content):
        return sum(count_characters(message.get("content")) for message in content)
    return 0


def check_prompt_sizes(
    prompts: Sequence[Prompt], *, context: int | None, response_length: int
) -> None:
    """Raise if a prompt has too many characters for the context; call this before encoding.

    Raises:
        DataError: a prompt is too large; the message names the row.
    """
    most = max_characters(None if context is None else context - response_length)
    limit = "the model's context has no limit"
    if context is not None:
        limit = f"the model reads {context} tokens, response_length={response_length} included"
    for row, prompt in enumerate(prompts):
        if (count := count_characters(prompt)) > most:
            raise DataError(
                f"The prompt in row {row} has {count:,} characters, and at most {most:,} are "
                f"tokenized: {limit}. Shorten or remove this prompt."
            )


def check_prompt_lengths(
    prompts: Sequence[Tokens], *, context: int | None, response_length: int
) -> None:
    """Raise if a prompt is empty, or too long to leave `response_length` tokens of context.

    If `context` is None, there is no limit.

    Raises:
        DataError: there are no prompts, a prompt has no token, or a prompt has more than
            `context - response_length` tokens.
    """
    if not prompts:
        raise DataError("There are no prompts, but PPO needs at least one. Add prompts.")
    empty = [i for i, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(prompts)} prompts have no token, the first in row {empty[0]}. "
            "Remove the empty prompts."
        )
    if context is None:
        return
    max_prompt_length = context - response_length
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > max_prompt_length]
    if long:
        worst = max(long, key=lambda i: len(prompts[i]))
        raise DataError(
            f"{len(long)} of {len(prompts)} prompts are longer than {max_prompt_length} tokens, "
            f"the context of {context} minus response_length={response_length}. The longest, in "
            f"row {worst}, has {len(prompts[worst])} tokens. Shorten or remove these prompts, or "
            "lower response_length."
        )


class PromptStream:
    """Draws batches of row numbers endlessly, in a new seeded order for each pass over the data."""

    def __init__(self, num_prompts: int, *, seed: int, samples: int = 1) -> None:
        """Start a stream of the row numbers 0 to num_prompts - 1, each repeated `samples` times."""
        self._num_prompts = num_prompts
        self._samples = samples
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """Start again at the beginning of the first pass."""
        self._generator = torch.Generator().manual_seed(self._seed)
        self._rows = self._draw_rows()

    def _draw_rows(self) -> Iterator[int]:
        while True:
            order = torch.randperm(self._num_prompts, generator=self._generator)
            yield from order.repeat_interleave(self._samples).tolist()

    def next_batch(self, batch_size: int) -> list[int]:
        """Return the next row numbers; a batch may span several passes, so no row is dropped."""
        return [next(self._rows) for _ in range(batch_size)]
