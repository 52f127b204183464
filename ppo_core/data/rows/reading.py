"""What a command says about the rows that it read."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ppo_core.data.rows.reader import Rows

MAX_SHOWN = 500
"""Maximum number of characters of a row that is shown."""


def describe_reading(rows: Rows) -> str:
    """Return a line with the number of rows, the columns that were read, and the rows left out."""
    columns = ", ".join(
        field if field == column else f"{field} from {column}"
        for field, column in rows.reading.items()
    )
    return f"{rows.source}: {len(rows)} rows, reading {columns}{describe_left_out(rows)}"


def describe_left_out(rows: Rows) -> str:
    """Return the number of rows that were left out, by reason; empty if there is none."""
    if not rows.left_out:
        return ""
    listed = ", ".join(f"{count} {reason}" for reason, count in rows.left_out.items())
    return f"; left out: {listed}"


def describe_first(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return a line with the first row as the model reads it, special tokens included."""
    text = repr(tokenizer.decode(list(ids)))
    shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
    return f"the first row, as the model reads it: {shown}"
