"""Find and remove repeated prompts, and remove the prompts of the evaluation from PPO's prompts."""

import json
from collections.abc import Sequence
from dataclasses import replace

from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.read_rows import ROW, Rows, derive, each
from ppo_core.data.rows.row_columns import Row
from ppo_core.errors import DataError
from ppo_core.io.folder_cache import digest_of_code


def prompt_key(prompt: str | Messages) -> str:
    """Return a text that is equal for equal prompts; a prompt is a text or messages."""
    return json.dumps(prompt)


def prompt_groups(prompts: Sequence[str | Messages]) -> list[int]:
    """Return the group of each prompt: equal prompts form one group, an empty prompt its own."""
    keys = [prompt_key(prompt) if prompt else place for place, prompt in enumerate(prompts)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def one_row_per_prompt(rows: Rows) -> Rows:
    """Return the first row of each different prompt; without repeats, return `rows` itself."""
    first: dict[str, int] = {}
    for position, prompt in enumerate(rows.column("prompt")):
        first.setdefault(prompt_key(prompt), position)
    if len(first) == len(rows):
        return rows
    return rows.select(list(first.values()), "one row per prompt")


def prompts_without(rows: Rows, others: Rows) -> Rows:
    """Return the rows whose prompts are not in `others`.

    Raises:
        DataError: no row is left.
    """

    def convert(row: Row) -> Row | None:
        if prompt_key(row["prompt"]) in taken:
            return None
        return {field: value for field, value in row.items() if field != ROW}

    taken = {prompt_key(prompt) for prompt in others.column("prompt")}
    inputs = {"others": others.digest, "code": digest_of_code(__name__)}
    kept = derive(rows, "training-prompts", inputs, each(convert))
    if not len(kept):
        raise DataError(
            f"{rows.source}: no prompt is left to train on, because all are equal to prompts of "
            f"the evaluation, {others.source}. Add more prompts, or set eval_prompts to others."
        )
    if gone := len(rows) - len(kept):
        return replace(kept, source=f"{rows.source}, without {gone} prompts of the evaluation")
    return kept
