"""Leave out or shorten rows that are too long for a model."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from ppo_core.config.row_settings import Overlong
from ppo_core.data.folder_cache import digest_of_code
from ppo_core.data.prompts import encode_dialogue, encode_prompt
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.overlong import fit_row
from ppo_core.data.rows.reader import ROW, Rows, derive
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.rows.tokenizer_digest import tokenizer_digest


def fit_prompts(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int | None,
    response_length: int,
    overlong: Overlong,
) -> Rows:
    """Return the rows whose prompts leave `response_length` tokens of a model's context.

    A context of None has no limit.

    Raises:
        DataError: a prompt is too long and `overlong` is "error", or more than 1 % of the rows are
            left out.
    """

    def length_of(row: Row) -> int:
        return len(encode_prompt(tokenizer, row["prompt"]))

    limit = None if context is None else context - response_length
    move = (
        f"The model's context has {context} tokens, {response_length} of them for the response. "
        "Lower response_length, or shorten or remove these prompts."
    )
    return _fit(rows, "fitting-prompts", tokenizer, length_of, limit, overlong, move)


def fit_pairs(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    overlong: Overlong,
    *,
    end_of_text: bool,
) -> Rows:
    """Return the preferences that a reward model can read, with 1 to `limit` tokens.

    Raises:
        DataError: see `fit_prompts`.
    """

    def length_of(row: Row) -> int:
        lengths = [
            len(encode_dialogue(tokenizer, row["prompt"], row[side], end=end_of_text))
            for side in ("chosen", "rejected")
        ]
        return max(lengths) if all(lengths) else 0

    name = f"fitting-pairs-{'ended' if end_of_text else 'open'}"
    move = "Shorten or remove these rows, which the reward model cannot read."
    return _fit(rows, name, tokenizer, length_of, limit, overlong, move)


def _fit(
    rows: Rows,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    length_of: Callable[[Row], int],
    limit: int | None,
    overlong: Overlong,
    move: str,
) -> Rows:
    def convert(row: Row) -> Row:
        fitting, length = fit_row(
            row, length_of, lambda length: length, limit=limit, overlong=overlong, move=move
        )
        if length == 0:
            raise RowError("without tokens")
        return {field: value for field, value in fitting.items() if field != ROW}

    inputs = {
        "tokenizer": tokenizer_digest(tokenizer),
        "limit": limit,
        "overlong": overlong,
        "code": digest_of_code("ppo_core.data.prompts"),
    }
    return derive(rows, name, inputs, convert)
