"""Mix new pairs with those that have already trained the reward model from which a run starts.

All new pairs train the reward model, and the share REPLAYED of the other pairs. Without them it
would forget what it has learned from them; with all of them, every pair would train it again each
week, and it would learn the oldest pairs by heart.
"""

from collections.abc import Collection, Iterable
from hashlib import blake2b
from pathlib import Path

import pyarrow
import pyarrow.compute as pc
from pyarrow import parquet

from pipeline.inputs.row_digests import ROWS_FILE, digest_of_row
from ppo_core.data.rows.forms import Row
from ppo_core.data.rows.reader import ROW, Rows, derive, each
from ppo_core.errors import DataError, ModelError
from ppo_core.io.folder_cache import digest_of, digest_of_code

REPLAYED = 0.25
"""Share of the pairs that trained the reward model before, and train it again."""

SALT_BYTES = 64
"""Maximum length of the key of `blake2b`."""

INHERITED, INHERITED_PAIRS = "start", "start-pairs"
"""Names in ROWS_FILE of the rows that a run has seen only through the models from which it starts.
The latter are pairs that trained the reward model."""

_TRAINED = ("preferences", "feedback", INHERITED_PAIRS)

_ONLY_READ = ("preferences-test", "judge-preferences", "eval-prompts", "human-labels")
"""Data sets that train neither reward model nor critic."""


def read_start_rows(folder: str | Path) -> pyarrow.Table:
    """Return the digests of the rows behind the models in a folder, see ROWS_FILE.

    Raises:
        ModelError: the file is missing, is not a parquet file, or has other columns.
    """
    try:
        table = parquet.read_table(Path(folder) / ROWS_FILE, memory_map=False)
        return table.select(["data_set", "digest", "is_row"])
    # The errors of pyarrow are of these kinds.
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"'{folder}' has no readable {ROWS_FILE}: {error}.") from error


def inherited_rows(seen: pyarrow.Table) -> pyarrow.Table:
    """Return the rows of a start under the names that they have in the next version."""
    trained = seen.filter(pc.invert(_is_in(seen, _ONLY_READ)))
    names = pc.if_else(_is_in(trained, _TRAINED), INHERITED_PAIRS, INHERITED)
    renamed = trained.set_column(0, "data_set", names)
    # A row that several weeks have read stands there once.
    once = renamed.group_by(["data_set", "digest"]).aggregate([("is_row", "any")])
    return once.rename_columns(seen.column_names).sort_by(
        [("data_set", "ascending"), ("digest", "ascending")]
    )


def trained_pairs(seen: pyarrow.Table) -> frozenset[bytes]:
    """Return the digests of the pairs and judgments that trained the reward model of a start."""
    pairs = seen.filter(pc.and_(_is_in(seen, _TRAINED), seen["is_row"]))
    return frozenset(pairs["digest"].to_pylist())


def new_and_replayed(rows: Rows, trained: Collection[bytes], seed: int) -> Rows:
    """Return the pairs that are not in `trained`, and the share REPLAYED of the others.

    A pair is drawn by its digest, the seed and all pairs in `trained`, wherever it stands. So a
    start from later models draws other pairs.

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
        "code": digest_of_code(__name__),
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
