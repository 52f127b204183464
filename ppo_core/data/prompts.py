"""Take prompts from the rows of data sets, and check their lengths."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.text_config import text_config
from ppo_core.errors import DataError

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
        return _without_padding(plain_ids(prompt), plain_ids(columns["attention_mask"]), row)
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


def plain_ids(ids: Any) -> Any:
    """Return an array or a tensor as a list, and any other value unchanged."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


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
