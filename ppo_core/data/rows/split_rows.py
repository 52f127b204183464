"""Split rows into rows for training and rows that are held out."""

from dataclasses import replace
from itertools import chain

from ppo_core.data.rows.read_rows import ROW, Rows
from ppo_core.errors import DataError


def held_out(rows: Rows, share: float, most: int | None = None) -> tuple[Rows, Rows]:
    """Split off the last fraction `share` of the rows; both results have at least one row.

    If `most` is given, at most this number of rows is split off. The pairs of one ranked list stay
    together, and so do the judgments of one prompt. If the last list or prompt has more than `most`
    rows, all of them are split off.

    Raises:
        DataError: there are fewer than two rows, or all rows are pairs of one prompt.
    """
    if len(rows) < 2:
        raise DataError(f"{rows.source} has one row, so none can be held out. Add rows.")
    cut = min(max(round(len(rows) * (1 - share)), 1), len(rows) - 1)
    if most is not None:
        cut = max(cut, len(rows) - most)
    cut = _between_prompts(rows, cut)
    first = rows.part(0, cut, f"first {cut}")
    last = rows.part(cut, len(rows), f"last {len(rows) - cut}")
    # The rows that were left out are reported with the first part.
    return reports_left_out(first, rows), last


def reports_left_out(part: Rows, rows: Rows) -> Rows:
    """Return a part of `rows` that reports which rows were left out of them."""
    files = rows.left_out_files
    return replace(part, left_out=rows.left_out, left_out_files=files, used=rows.used)


def _between_prompts(rows: Rows, cut: int) -> int:
    """Return the first position at or after `cut` between two ranked lists or prompts.

    If there is none, return the last such position before `cut`; if there is none at all, raise.
    """
    numbers = rows.table.with_format("arrow")[ROW]
    places = chain(range(cut, len(rows)), range(cut - 1, 0, -1))
    for place in places:
        if numbers[place] != numbers[place - 1]:
            return place
    raise DataError(
        f"{rows.source} has the pairs of one prompt, so none can be held out. Add prompts."
    )
