"""Add pairs against two errors of reward models that people's pairs rarely show."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from ppo_core.data.rows.read_rows import ROW
from ppo_core.data.rows.row_columns import Row
from ppo_core.supervised.supervised_config import SupervisedConfig


def added_pairs(rows: Sequence[Row], config: SupervisedConfig) -> list[list[Row]]:
    """Return the pairs to add for each of the rows, in which the row's chosen response wins.

    It wins against itself written twice (`repeated_text_pairs`), and against the chosen response of
    the next row with another prompt (`other_prompt_pairs`; arXiv:2409.13156). An added pair has the
    weight of its row, and no margin. Ties, and rows without a chosen response, get no pairs.
    """
    return [[*_added(rows, place, config)] for place in range(len(rows))]


def _added(rows: Sequence[Row], place: int, config: SupervisedConfig) -> Iterator[Row]:
    row = rows[place]
    chosen = row["chosen"]
    if not chosen or row.get("tie"):
        return
    if _is_drawn(row[ROW], config.repeated_text_pairs):
        yield {**row, "rejected": f"{chosen} {chosen}", "margin": None}
    if _is_drawn(row[ROW], config.other_prompt_pairs):
        others = chain(islice(rows, place + 1, None), islice(rows, place))
        fitting = (
            other["chosen"]
            for other in others
            if other["prompt"] != row["prompt"] and other["chosen"] not in (None, chosen)
        )
        if answer := next(fitting, None):
            yield {**row, "rejected": answer, "margin": None}


def _is_drawn(number: int, share: float) -> bool:
    """Return whether a row is one of the fraction `share` of all rows, at equal distances."""
    return int((number + 1) * share) > int(number * share)
