"""Prompts: from data sets to token ids, from token ids to text, and their endless stream."""

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
"""Text, chat messages, or the policy's token ids (an array or a tensor will do as well)."""

PROMPT_COLUMNS = ("input_ids", "prompt", "messages", "query")
"""Where a row may keep its prompt; the first that is there is taken."""


# --- From data sets to prompts -----------------------------------------------------


def prompts_of(dataset: Iterable[Any]) -> list[Prompt]:
    """The prompts of a `datasets.Dataset`, of a list of rows, or of a list of prompts.

    A row is a mapping with one of `PROMPT_COLUMNS`. Tokens of "input_ids" that its
    "attention_mask" hides are padding and left out; of "messages", an answer that the
    assistant gives at the end is left out.

    Raises:
        DataError: it is one text, or a row has none of the columns.
    """
    if isinstance(dataset, Mapping):
        raise DataError(
            f"The prompts are a mapping of {', '.join(map(str, dataset))}, not one data set. "
            "Choose a split, as in dataset['train']."
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
            f"Row {row} has no prompt: its columns are {', '.join(map(str, columns))}, and none of "
            f"{', '.join(PROMPT_COLUMNS)} is there and filled. Rename a column."
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
            "be equally long. Tokenise the row again."
        )
    return [token for token, seen in zip(ids, mask, strict=True) if seen]


def _plain(ids: Any) -> Any:
    """An array or a tensor as a list; anything else as it is."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


# --- From prompts and responses to token ids ---------------------------------------


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Tokens:
    """Token ids of a prompt, without an end token.

    Text gets the tokenizer's own start tokens; messages are rendered by its chat template, up
    to where the assistant answers; token ids are taken as they are.

    Raises:
        DataError: it is none of these, an id lies outside the vocabulary, or there are
            messages and no chat template.
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
            f"{ids!r:.80}. Convert or drop it."
        )
    size = len(tokenizer)
    strange = next((token for token in ids if not 0 <= token < size), None)
    if strange is not None:
        raise DataError(
            f"Token {strange} of a prompt is not one of the tokenizer's {size} tokens: another "
            "tokenizer made it. Encode the prompts again, or give them as text."
        )
    return [int(token) for token in ids]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], num_proc: int | None = None
) -> list[Tokens]:
    """Token ids of many prompts, by `num_proc` processes if that is more than one.

    Raises:
        DataError: as `encode_prompt`, with the number of the row.
    """
    if num_proc is None or num_proc == 1:
        return [_encode_row(tokenizer, prompt, row) for row, prompt in enumerate(prompts)]
    from datasets import Dataset

    # Arrow holds one type a column and fills up the keys that a message lacks; JSON does neither.
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
    """Token ids of a response; `end` appends the end-of-sequence token.

    Supervised training, validation and scoring all encode prompt and response apart and join
    the ids, so that a model is never scored on other tokens than it was trained on (TRL #1702).
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
    """Token ids of a prompt with its response, as a reward model with this tokenizer reads them.

    Text is encoded apart and joined; messages are rendered by the tokenizer's own template with
    the response as the assistant's turn. `end` sees to an end-of-sequence token at the end.

    Raises:
        DataError: the prompt is token ids, which another tokenizer may have made; or there are
            messages and no chat template.
    """
    if is_messages(prompt):
        answer = {"role": "assistant", "content": response}
        return encode_chat(tokenizer, [*prompt, answer], end=end)
    if not isinstance(prompt, str):
        raise DataError(
            f"A reward model reads text or messages, not {prompt!r:.80}. Decode token ids by the "
            "tokenizer that made them."
        )
    return _encode_text(tokenizer, prompt) + encode_response(tokenizer, response, end=end)


# --- From token ids to text --------------------------------------------------------


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """A prompt as people and reward functions read it.

    Messages are rendered by the chat template; token ids are decoded, special tokens left out.
    """
    if isinstance(prompt, str):
        return prompt
    if is_messages(prompt):
        return render_chat(tokenizer, prompt, answer_follows=True)
    ids = _checked_ids(tokenizer, _plain(prompt))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def response_text(tokenizer: PreTrainedTokenizerBase, prompt: Tokens, response: Tokens) -> str:
    """The text that a response adds to its prompt, special tokens left out.

    Tokenizers that mark word starts drop a leading space when a response is decoded alone;
    it is kept here, so that prompt + text reads as the model wrote it.
    """
    before = str(tokenizer.decode(prompt, skip_special_tokens=True))
    whole = str(tokenizer.decode([*prompt, *response], skip_special_tokens=True))
    if whole.startswith(before):
        return whole[len(before) :]
    return str(tokenizer.decode(response, skip_special_tokens=True))


def response_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """The text of each response of a rollout, up to its stop token."""
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


# --- What a run draws from ---------------------------------------------------------


def context_length(config: Any) -> int | None:
    """Most tokens that a model takes; None where its configuration sets no bound."""
    return getattr(config, "max_position_embeddings", None)


def check_prompt_lengths(
    prompts: Sequence[Tokens], *, context: int | None, response_length: int
) -> None:
    """Refuse prompts that leave no room for a response; a context of None has no bound.

    Raises:
        DataError: a prompt has no token, or more than `context - response_length`.
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
    room = context - response_length
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > room]
    if long:
        worst = max(long, key=lambda i: len(prompts[i]))
        raise DataError(
            f"{len(long)} of {len(prompts)} prompts are longer than {room} tokens, the context of "
            f"{context} less response_length={response_length}; the longest, in row {worst}, has "
            f"{len(prompts[worst])}. Shorten or remove them, or lower response_length."
        )


class PromptStream:
    """Batches of row numbers without end: every pass over the data in a new seeded order."""

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        """Draw from rows 0 .. num_prompts - 1."""
        self._num_prompts = num_prompts
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """Begin again with the first row of the first pass."""
        self._generator = torch.Generator().manual_seed(self._seed)
        self._rows = self._draw_rows()

    def _draw_rows(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self._num_prompts, generator=self._generator).tolist()

    def next_batch(self, batch_size: int) -> list[int]:
        """The next row numbers; a batch may span two passes, so none is dropped."""
        return [next(self._rows) for _ in range(batch_size)]
