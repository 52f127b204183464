"""Mix new pairs with old pairs, which have already trained the champion's reward model.

A run that starts from the champion's reward model trains it on all new pairs and on the fraction
REPLAYED of the old pairs. Without old pairs, the model would forget them. With all old pairs, every
pair would train the model again each week, and the model would overfit the oldest pairs.
"""

from collections.abc import Collection, Iterable
from hashlib import blake2b
from pathlib import Path

import pyarrow
import pyarrow.compute as pc
from pyarrow import parquet

from pipeline.inputs.row_digests import ROWS_FILE, digest_of_row
from ppo_core.data.rows.read_rows import ROW, Rows, derive, each
from ppo_core.data.rows.row_columns import Row
from ppo_core.errors import DataError, ModelError
from ppo_core.io.folder_cache import digest_of, digest_of_code

REPLAYED = 0.25
"""Fraction of the old pairs that train the reward model again."""

SALT_BYTES = 64
"""Maximum length of the key of `blake2b`."""

INHERITED, INHERITED_PAIRS = "start", "start-pairs"
"""Names in ROWS_FILE for rows that a run has seen only through the models from which it starts:
INHERITED_PAIRS for pairs that trained the reward model, and INHERITED for all other rows."""

_TRAINED = ("preferences", "feedback", INHERITED_PAIRS)

_ONLY_READ = ("preferences-test", "judge-preferences", "eval-prompts", "human-labels")
"""Data sets that train neither the reward model nor the critic."""


def read_start_rows(folder: str | Path) -> pyarrow.Table:
    """Return the digests of the rows that the champion's run read, from the ROWS_FILE in a folder.

    Raises:
        ModelError: the file is missing, is not a parquet file, or has other columns.
    """
    try:
        table = parquet.read_table(Path(folder) / ROWS_FILE, memory_map=False)
        return table.select(["data_set", "digest", "is_row"])
    # pyarrow raises these errors.
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"'{folder}' has no readable {ROWS_FILE}: {error}.") from error


def inherited_rows(seen: pyarrow.Table) -> pyarrow.Table:
    """Return the rows that trained the champion's models, named INHERITED or INHERITED_PAIRS."""
    trained = seen.filter(pc.invert(_is_in(seen, _ONLY_READ)))
    names = pc.if_else(_is_in(trained, _TRAINED), INHERITED_PAIRS, INHERITED)
    renamed = trained.set_column(0, "data_set", names)
    # A row that several runs have read becomes one row.
    once = renamed.group_by(["data_set", "digest"]).aggregate([("is_row", "any")])
    return once.rename_columns(seen.column_names).sort_by(
        [("data_set", "ascending"), ("digest", "ascending")]
    )


def trained_pairs(seen: pyarrow.Table) -> frozenset[bytes]:
    """Return the digests of the pairs and judgments that trained the champion's reward model."""
    pairs = seen.filter(pc.and_(_is_in(seen, _TRAINED), seen["is_row"]))
    return frozenset(pairs["digest"].to_pylist())


def new_and_replayed(rows: Rows, trained: Collection[bytes], seed: int) -> Rows:
    """Return all pairs that are not in `trained`, and the fraction REPLAYED of the other pairs.

    Whether an old pair is replayed depends on its digest, the seed and all digests in `trained`,
    not on its position. So a run that starts from later models replays other pairs.

    Raises:
        DataError: no pair is left.
    """
    known = digest_of(sorted(one.hex() for one in trained))
    salt = f"{seed} {known}".encode()[:SALT_BYTES]

    def is_replayed(digest: bytes) -> bool:
        lot = blake2b(digest, digest_size=8, key=salt).digest()
        return int.from_bytes(lot, "little") < REPLAYED * 2**64

    def convert(row: Row) -> Row | None:
        digest = digest_of_row(row)
        if digest in trained and not is_replayed(digest):
            return None
        return {name: value for name, value in row.items() if name != ROW}

    inputs = {
        "trained": known,
        "seed": seed,
        "code": digest_of_code(__name__, digest_of_row.__module__),
    }
    kept = derive(rows, "new-and-replayed-pairs", inputs, each(convert))
    if not len(kept):
        raise DataError(
            f"{rows.source}: all {len(rows)} pairs have trained the reward model of the champion, "
            "and none was drawn to train it again. Add pairs."
        )
    return kept


def count_trained(rows: Iterable[Row], trained: Collection[bytes]) -> int:
    """Return how many of the pairs are in `trained`."""
    return sum(digest_of_row(row) in trained for row in rows)


def _is_in(table: pyarrow.Table, names: tuple[str, ...]) -> pyarrow.ChunkedArray:
    return pc.is_in(table["data_set"], value_set=pyarrow.array(names, pyarrow.string()))
