"""Prompts: read from data sets, encoded, decoded, checked, and drawn in random order."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from ppo_core.data.chat_template import Messages, encode_chat, is_messages, render_chat
from ppo_core.data.types import Rollout
from ppo_core.errors import DataError

Tokens = list[int]

Prompt: TypeAlias = str | Messages | Sequence[int]
"""Text, chat messages, or the policy's token ids (also as an array or tensor)."""

PROMPT_COLUMNS = ("input_ids", "prompt", "messages", "query")
"""Columns that may hold the prompt of a row; the first one present is used."""


# --- From data sets to prompts -----------------------------------------------------


def prompts_of(dataset: Iterable[Any]) -> list[Prompt]:
    """Return the prompts of a `datasets.Dataset`, a list of rows, or a list of prompts.

    A row is a mapping with one of `PROMPT_COLUMNS`. Padding in "input_ids", as marked by
    "attention_mask", is removed; so is a final assistant message in "messages".

    Raises:
        DataError: the data set is one text or a mapping, or a row has none of the columns.
    """
    if isinstance(dataset, Mapping):
        raise DataError(
            f"The prompts are a mapping of {', '.join(map(str, dataset))}, not one data set. "
            "Choose a split, for example dataset['train']."
        )
    if isinstance(dataset, str):
        raise DataError(
            f"The prompts are one text, {dataset!r:.80}, not a data set. Load the data set first, "
            "or put the text into a list."
        )
    return [
        _prompt_of_row(item, row) if isinstance(item, Mapping) else item
        for row, item in enumerate(dataset)
    ]


def _prompt_of_row(columns: Mapping[str, Any], row: int) -> Prompt:
    name = next((name for name in PROMPT_COLUMNS if columns.get(name) is not None), None)
    if name is None:
        raise DataError(
            f"Row {row} has no prompt: its columns are {', '.join(map(str, columns))}, and it has "
            f"no value in {', '.join(PROMPT_COLUMNS)}. Rename a column."
        )
    prompt: Prompt = columns[name]
    if name == "input_ids" and columns.get("attention_mask") is not None:
        return _without_padding(_plain(prompt), _plain(columns["attention_mask"]), row)
    if name == "messages" and is_messages(prompt) and prompt[-1].get("role") == "assistant":
        return prompt[:-1]
    return prompt


def _without_padding(ids: Tokens, mask: Sequence[int], row: int) -> Tokens:
    if len(ids) != len(mask):
        raise DataError(
            f"Row {row} has {len(ids)} input_ids and an attention_mask of {len(mask)}; they must "
            "have equal lengths. Tokenize the row again."
        )
    return [token for token, visible in zip(ids, mask, strict=True) if visible]


def _plain(ids: Any) -> Any:
    """Return an array or a tensor as a list, any other value unchanged."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


# --- From prompts and responses to token ids ---------------------------------------


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Tokens:
    """Return the token ids of a prompt, without an end-of-sequence token.

    Text gets the tokenizer's start tokens; messages are rendered by its chat template up to the
    start of the assistant's response; token ids are returned unchanged.

    Raises:
        DataError: the prompt has another type, an id is outside the vocabulary, or messages are
            given and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return _encode_text(tokenizer, prompt)
    if is_messages(prompt):
        text = render_chat(tokenizer, prompt, answer_follows=True)
        ids: Tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
    return _checked_ids(tokenizer, _plain(prompt))


def _encode_text(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tokens:
    ids: Tokens = tokenizer(prompt)["input_ids"]
    if ids[-1:] != [tokenizer.eos_token_id]:
        return ids
    plain: Tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ends_by_itself = plain[-1:] == [tokenizer.eos_token_id]
    return ids if ends_by_itself else ids[:-1]


def _checked_ids(tokenizer: PreTrainedTokenizerBase, ids: object) -> Tokens:
    if not isinstance(ids, Sequence) or not all(isinstance(token, Integral) for token in ids):
        raise DataError(
            f"A prompt is text, chat messages or token ids, not {type(ids).__name__}: "
            f"{ids!r:.80}. Convert or remove the prompt."
        )
    size = len(tokenizer)
    unknown = next((token for token in ids if not 0 <= token < size), None)
    if unknown is not None:
        raise DataError(
            f"Token {unknown} of a prompt is not one of the tokenizer's {size} tokens: another "
            "tokenizer made it. Encode the prompts again, or give them as text."
        )
    return [int(token) for token in ids]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], num_proc: int | None = None
) -> list[Tokens]:
    """Return the token ids of many prompts, encoded by `num_proc` processes.

    Raises:
        DataError: as `encode_prompt`, with the row number.
    """
    if num_proc is None or num_proc == 1:
        return [_encode_row(tokenizer, prompt, row) for row, prompt in enumerate(prompts)]
    from datasets import Dataset

    # As JSON, because an Arrow column holds one type and adds missing keys to messages.
    rows = Dataset.from_dict({"prompt": [json.dumps(prompt, default=_plain) for prompt in prompts]})
    encoded = rows.map(
        _encode_json, with_indices=True, fn_kwargs={"tokenizer": tokenizer}, num_proc=num_proc
    )
    return list(encoded["input_ids"])


def _encode_row(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, row: int) -> Tokens:
    try:
        return encode_prompt(tokenizer, prompt)
    except DataError as error:
        raise DataError(f"Row {row}: {error}") from error


def _encode_json(
    columns: Mapping[str, str], row: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Tokens]:
    return {"input_ids": _encode_row(tokenizer, json.loads(columns["prompt"]), row)}


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str, *, end: bool) -> Tokens:
    """Return the token ids of a response; `end` appends the end-of-sequence token.

    Supervised training, validation and scoring all encode prompt and response separately and
    concatenate the ids, so that a model is scored on the same tokens as it was trained on
    (TRL #1702).
    """
    ids: Tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not end:
        return ids
    if tokenizer.eos_token_id is None:
        raise DataError("The tokenizer has no end-of-sequence token to end a response with.")
    return [*ids, tokenizer.eos_token_id]


def encode_dialogue(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, response: str, *, end: bool
) -> Tokens:
    """Return token ids of a prompt with its response, as input of a reward model.

    Prompt and response texts are encoded separately and concatenated; messages are rendered by
    the tokenizer's chat template with the response as the assistant's turn. `end` makes the ids
    end in an end-of-sequence token.

    Raises:
        DataError: the prompt is token ids, which may be another tokenizer's; or messages are given
            and the tokenizer has no chat template.
    """
    if is_messages(prompt):
        reply = {"role": "assistant", "content": response}
        return encode_chat(tokenizer, [*prompt, reply], end=end)
    if not isinstance(prompt, str):
        raise DataError(
            f"A reward model reads text or messages, not {prompt!r:.80}. Decode token ids with the "
            "tokenizer that encoded them."
        )
    return _encode_text(tokenizer, prompt) + encode_response(tokenizer, response, end=end)


# --- From token ids to text --------------------------------------------------------


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Return the text of a prompt for people and reward functions.

    Messages are rendered by the chat template; token ids are decoded without special tokens.
    """
    if isinstance(prompt, str):
        return prompt
    if is_messages(prompt):
        return render_chat(tokenizer, prompt, answer_follows=True)
    ids = _checked_ids(tokenizer, _plain(prompt))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def response_text(tokenizer: PreTrainedTokenizerBase, prompt: Tokens, response: Tokens) -> str:
    """Return the text that a response adds to its prompt, without special tokens.

    Tokenizers that mark word starts drop a leading space when a response is decoded alone. Prompt
    and response are decoded together to keep it.
    """
    prefix = str(tokenizer.decode(prompt, skip_special_tokens=True))
    full = str(tokenizer.decode([*prompt, *response], skip_special_tokens=True))
    if full.startswith(prefix):
        return full[len(prefix) :]
    return str(tokenizer.decode(response, skip_special_tokens=True))


def response_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """Return the text of each response of a rollout, up to its stop token."""
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
    """Return the maximum sequence length of a model; None if its configuration sets none."""
    return getattr(config, "max_position_embeddings", None)


def check_prompt_lengths(
    prompts: Sequence[Tokens], *, context: int | None, response_length: int
) -> None:
    """Raise if a prompt is empty or leaves too little of the context for a response.

    Raises:
        DataError: there is no prompt, or one has no token, or one has more than
            `context - response_length`; a context of None is unbounded.
    """
    if not prompts:
        raise DataError("There are no prompts; PPO needs at least one.")
    empty = [i for i, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(prompts)} prompts have no token, the first in row {empty[0]}. "
            "Remove them."
        )
    if context is None:
        return
    max_prompt_length = context - response_length
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > max_prompt_length]
    if long:
        worst = max(long, key=lambda i: len(prompts[i]))
        raise DataError(
            f"{len(long)} of {len(prompts)} prompts are longer than {max_prompt_length} tokens: "
            f"the context is {context}, response_length is {response_length}. The longest, in row "
            f"{worst}, has {len(prompts[worst])}. Shorten or remove them, or lower response_length."
        )


class PromptStream:
    """Endless batches of row numbers, in a new seeded order for each pass over the data."""

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        """Draw row numbers from 0 to num_prompts - 1."""
        self._num_prompts = num_prompts
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """Restart at the beginning of the first pass."""
        self._generator = torch.Generator().manual_seed(self._seed)
        self._rows = self._draw_rows()

    def _draw_rows(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self._num_prompts, generator=self._generator).tolist()

    def next_batch(self, batch_size: int) -> list[int]:
        """Return the next row numbers; a batch may span two passes, so no row is dropped."""
        return [next(self._rows) for _ in range(batch_size)]
