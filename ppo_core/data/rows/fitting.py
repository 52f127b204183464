"""Leave out or shorten rows that are too long for a model."""

from collections.abc import Callable, Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from ppo_core.config.row_settings import Overlong
from ppo_core.data.prompts import dialogue_segments, prompt_segment
from ppo_core.data.rows.encoding import Encoding, tokenizer_digest
from ppo_core.data.rows.overlong import fit_rows
from ppo_core.data.rows.reader import ROW, Rows, derive
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.rows.row_formats import Row
from ppo_core.data.segments import EncodedSegment, Segment, joined
from ppo_core.errors import ConfigError
from ppo_core.io.folder_cache import digest_of_code


def fit_prompts(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int | None,
    response_length: int,
    overlong: Overlong,
) -> Rows:
    """Return the rows whose prompts leave room for `response_length` tokens in a model's context.

    With overlong="truncate", prompts that are too long are shortened. If `context` is None, there
    is no limit.

    Raises:
        ConfigError: the context has no room for a prompt.
        DataError: a prompt is too long and `overlong` is "error", or more than the fraction
            `rows.max_left_out` of the rows is left out.
    """

    def sequences(row: Row) -> list[list[Segment]]:
        return [[prompt_segment(tokenizer, row["prompt"])]]

    limit = None if context is None else context - response_length
    if limit is not None and limit < 1:
        raise ConfigError(
            f"The model's context of {context} tokens has no room for a prompt and "
            f"response_length={response_length} tokens. Lower response_length."
        )
    move = (
        f"The model's context has {context} tokens, {response_length} of them for the response. "
        "Lower response_length, or shorten or remove these prompts."
    )
    return _fit(rows, "fitting-prompts", tokenizer, sequences, limit, overlong, move)


def fit_pairs(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    overlong: Overlong,
    *,
    end_of_text: bool,
) -> Rows:
    """Return the preferences whose two texts each have 1 to `limit` tokens for a reward model.

    With overlong="truncate", prompts that are too long are shortened. If `limit` is None, there is
    no maximum.

    Raises:
        DataError: see `fit_prompts`.
    """

    def sequences(row: Row) -> list[list[Segment]]:
        return [
            dialogue_segments(tokenizer, row["prompt"], row[side], end=end_of_text)
            for side in ("chosen", "rejected")
        ]

    name = f"fitting-pairs-{'ended' if end_of_text else 'open'}"
    move = "Shorten or remove these rows, which the reward model cannot read."
    return _fit(rows, name, tokenizer, sequences, limit, overlong, move)


def _fit(
    rows: Rows,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Callable[[Row], list[list[Segment]]],
    limit: int | None,
    overlong: Overlong,
    move: str,
) -> Rows:
    """Return the rows whose sequences all have 1 to `limit` tokens."""

    def length_of(row: Row, encoded: Sequence[list[EncodedSegment]]) -> int:
        lengths = [len(joined(sequence)) for sequence in encoded]
        return max(lengths) if all(lengths) else 0

    encoding = Encoding(sequences, length_of, length=int)

    def convert(batch: Sequence[Row]) -> Iterator[Row | RowError]:
        for outcome in fit_rows(
            tokenizer, encoding, batch, limit=limit, overlong=overlong, move=move
        ):
            if isinstance(outcome, RowError):
                yield outcome
                continue
            fitting, length = outcome
            if length == 0:
                yield RowError("without tokens")
            else:
                yield {field: value for field, value in fitting.items() if field != ROW}

    inputs = {
        "tokenizer": tokenizer_digest(tokenizer),
        "limit": limit,
        "overlong": overlong,
        "code": digest_of_code(
            "ppo_core.data.chat_template", "ppo_core.data.prompts", "ppo_core.data.segments"
        ),
    }
    return derive(rows, name, inputs, convert)
