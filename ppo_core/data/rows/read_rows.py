"""Read a data set once into the cache; leave out and count the rows that cannot be used."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeAlias

import pyarrow
from datasets import Dataset, config, disable_progress_bars
from tqdm import tqdm

from ppo_core.config.row_settings import DEFAULT_READING, MAX_LEFT_OUT, ReadOptions
from ppo_core.data.rows.pair_formats import pair_schema_of
from ppo_core.data.rows.rankings import pairing
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.rows.row_error import RowError, attempt, list_reasons
from ppo_core.data.rows.row_formats import Kind, find_row_format
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE, RawRow
from ppo_core.data.sources.source import Source, named_data, open_source
from ppo_core.errors import DataError
from ppo_core.io.atomic_files import explained_writes
from ppo_core.io.folder_cache import Cached, digest_of, digest_of_code, make_once
from ppo_core.io.progress_bar import BAR_DELAY, progress
from ppo_core.io.text_files import has_half_character

LEAST_SHARED = 5_000
"""Minimum number of rows for which machines share a copy of the converted rows. Fewer rows are
encoded in less than 2 seconds, so a copy would not be worth the requests to the storage."""

ROW = "row"
"""Column with the number of a row in its data set, counted from 0."""

_ROWS_FOR_COLUMNS = 100
"""Number of rows, at the start of a data set, that show its columns, and whether its responses
repeat their prompts."""

_AS_JSON = json.JSONEncoder(sort_keys=True).encode

_MAX_SHOWN = 400
"""Maximum number of characters of a row that a message shows."""

_TABLE, _LEFT_OUT = "rows.arrow", "left-out.jsonl"

_CODE = (
    "ppo_core.config.field_checks",
    "ppo_core.config.row_settings",
    "ppo_core.io.text_files",
    "ppo_core.data.chat_template",
    *(
        f"ppo_core.data.{package}.{file.stem}"
        for package in ("rows", "sources")
        for file in sorted((Path(__file__).parents[1] / package).glob("*.py"))
    ),
)
"""Modules whose code determines how a row is read."""

Convert: TypeAlias = Callable[[Sequence[RawRow]], Iterable[Row | Sequence[Row] | RowError | None]]
"""Function that converts a batch of rows. For each row, it returns one of these: one converted row;
several converted rows; a RowError, so that the row is left out and counted; or None, so that the
row is left out without being counted."""


class TooManyLeftOutError(DataError):
    """More rows cannot be used than the setting `max_left_out` allows."""

    def __init__(self, message: str, files: tuple[Path, ...] = ()) -> None:
        """Store the message and the files of the left-out rows, see `Rows.left_out_files`."""
        super().__init__(message)
        self.files = files


@dataclass(frozen=True)
class Rows:
    """The usable rows of a data set, on disk."""

    source: str
    """File, folder or hub id, followed by the name of the part if the data set was split."""

    table: Dataset
    """The converted rows, with the column `ROW`."""

    digest: str
    """Digest of the usable rows."""

    reading: dict[str, str]
    """Field -> the column or columns from which the field was read."""

    left_out: dict[str, int]
    """Reason -> number of rows that were left out for this reason."""

    key: str
    """Cache key of these rows and their row numbers."""

    left_out_files: tuple[Path, ...] = ()
    """JSON-lines files of the rows that were left out, each row with its number and the reason."""

    used: Fraction = Fraction(1)
    """Product, over all conversions, of the share of rows that the conversion did not leave out. It
    cannot be computed from the counts, because a conversion may make several rows of one."""

    max_left_out: float = MAX_LEFT_OUT
    """Maximum fraction of the rows that may be left out, in all conversions together."""

    def __len__(self) -> int:
        """Return the number of usable rows."""
        return len(self.table)

    def __iter__(self) -> Iterator[RawRow]:
        """Yield the rows, one after the other."""
        for batch in self.table.with_format("arrow").iter(ROWS_AT_ONCE):
            yield from batch.to_pylist()

    def column(self, name: str, limit: int | None = None) -> list[Any]:
        """Return the values of a column, or its first `limit` values."""
        return list(self.table.select_columns([name])[:limit][name])

    def has(self, name: str) -> bool:
        """Return whether all rows have a value of an optional column."""
        if not len(self.table) or name not in self.table.column_names:
            return False
        return self.table.with_format("arrow")[name].null_count == 0

    def part(self, begin: int, end: int, name: str) -> "Rows":
        """Return the rows `begin` to `end - 1`, without what is known about left-out rows."""
        return replace(
            self.without_left_out(),
            source=f"{self.source} ({name})",
            table=self.table.select(range(begin, end)),
            digest=digest_of([self.digest, begin, end]),
            key=digest_of([self.key, begin, end]),
        )

    def select(self, positions: Sequence[int], name: str) -> "Rows":
        """Return the rows at `positions`, without what is known about left-out rows."""
        return replace(
            self.without_left_out(),
            source=f"{self.source} ({name})",
            table=self.table.select(positions),
            digest=digest_of([self.digest, positions]),
            key=digest_of([self.key, positions]),
        )

    def without_left_out(self) -> "Rows":
        """Return the same rows, without what is known about left-out rows."""
        return replace(self, left_out={}, left_out_files=(), used=Fraction(1))


def read_rows(
    source: str,
    kind: Kind,
    *,
    is_chat: bool = False,
    split: str | None = None,
    config_name: str | None = None,
    takes_token_ids: bool = False,
    options: ReadOptions = DEFAULT_READING,
) -> Rows:
    """Read a data set; if the same content was read before, take the rows from the cache.

    Args:
        source: name of the data set, see `open_source`.
        kind: use of the data set.
        is_chat: whether prompts become messages.
        split: name of a split, or a slice of a split.
        config_name: name of a configuration, see `open_source`.
        takes_token_ids: whether prompts may be token ids.
        options: renamed columns, whether addresses are allowed, and how many rows may be left out.

    Raises:
        ConfigError: a local file or folder has no such configuration.
        DataError: the data set or a column is missing or unreadable, there is no row, or too many
            rows cannot be used.
    """
    opened = open_source(source, split, config_name, allow_urls=options.allow_urls)
    return read_source(
        opened, kind, is_chat=is_chat, takes_token_ids=takes_token_ids, options=options
    )


def read_source(
    opened: Source,
    kind: Kind,
    *,
    is_chat: bool,
    takes_token_ids: bool = False,
    options: ReadOptions = DEFAULT_READING,
) -> Rows:
    """Read the rows of a source, see `read_rows`.

    Raises:
        DataError: see `read_rows`.
    """
    source = opened.name
    form = {"kind": kind, "is_chat": is_chat, "takes_token_ids": takes_token_ids}
    inputs = {
        "source": opened.digest,
        "renamed": dict(options.renamed),
        "code": digest_of_code(*_CODE),
        **form,
    }

    def make(folder: Path) -> dict[str, Any]:
        rows = opened.rows()
        first = list(islice(rows, _ROWS_FOR_COLUMNS))
        if not first:
            raise DataError(
                f"'{source}' is empty: its split '{opened.split}' has no row. Name a data set with "
                "at least one."
            )
        with named_data(source):
            found = find_row_format(
                kind,
                dict.fromkeys(name for row in first for name in row),
                is_chat=is_chat,
                takes_token_ids=takes_token_ids,
                renamed=options.renamed,
                first=first,
            )
        numbered = enumerate(chain(first, rows))
        facts = _write(folder, numbered, each(found.convert), found.schema, source)
        return facts | {"reading": found.reading, "is_judged": found.is_judged}

    # `max_left_out` is not among the inputs, because the rows do not depend on it.
    made = _made(f"rows-{kind}", inputs, make)
    _check_left_out(made, source, options.max_left_out)
    rows = _opened(made, source, options.max_left_out)
    return _pairs_of_judgements(rows) if made.values["is_judged"] else rows


def _pairs_of_judgements(rows: Rows) -> Rows:
    schema = pair_schema_of(rows.table.features.arrow_schema)
    return derive(rows, "pairs-of-judgements", {}, pairing(rows, rows.table.__getitem__), schema)


def derive(
    rows: Rows,
    name: str,
    inputs: Mapping[str, Any],
    convert: Convert,
    schema: pyarrow.Schema | None = None,
) -> Rows:
    """Convert rows; a second call with the same rows and inputs returns the cached rows.

    If `rows` has at least `LEAST_SHARED` rows, a call within `folder_cache.sharing` also reuses the
    rows that another machine has converted.

    Args:
        rows: rows to convert.
        name: name of the conversion, and of its folder in the cache.
        inputs: everything except `rows` that determines the result; must be serializable as JSON.
        convert: function that converts a batch of rows.
        schema: types of the converted rows; by default the types of `rows`.

    Raises:
        TooManyLeftOutError: more than the fraction `rows.max_left_out` of the rows is left out.
        DataError: `convert` raises it.
    """
    types = schema or rows.table.features.arrow_schema.remove_metadata()
    if ROW in types.names:
        types = types.remove(types.get_field_index(ROW))

    def make(folder: Path) -> dict[str, Any]:
        numbered = ((row[ROW], row) for row in rows)
        facts = _write(folder, numbered, convert, types, rows.source, len(rows))
        return facts | {"reading": rows.reading}

    everything = {"rows": rows.key, "code": digest_of_code(*_CODE), **inputs}
    made = _made(name, everything, make, shared=len(rows) >= LEAST_SHARED)
    _check_left_out(made, rows.source, rows.max_left_out, rows)
    found = _opened(made, rows.source, rows.max_left_out)
    counts = {
        reason: rows.left_out.get(reason, 0) + found.left_out.get(reason, 0)
        for reason in {**rows.left_out, **found.left_out}
    }
    files = (*rows.left_out_files, *found.left_out_files)
    used = rows.used * found.used
    return replace(found, left_out=counts, left_out_files=files, used=used)


def each(convert: Callable[[RawRow], Row | Sequence[Row] | None]) -> Convert:
    """Return a function that converts a batch row by row; a RowError is returned, not raised."""
    return lambda batch: (attempt(convert, row) for row in batch)


def _made(
    name: str,
    inputs: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, Any]],
    *,
    shared: bool = False,
) -> Cached:
    cache = Path(config.HF_DATASETS_CACHE) / "ppo_core"
    with explained_writes(cache):
        return make_once(cache, name, inputs, make, shared=shared)


def _opened(made: Cached, source: str, max_left_out: float) -> Rows:
    facts = made.values
    disable_progress_bars()
    return Rows(
        source=source,
        table=Dataset.from_file(str(made.path / _TABLE)),
        digest=facts["digest"],
        reading=facts["reading"],
        left_out=facts["left_out"],
        key=made.path.name,
        left_out_files=(made.path / _LEFT_OUT,) if facts["left_out"] else (),
        used=_used(facts),
        max_left_out=max_left_out,
    )


def _write(
    folder: Path,
    rows: Iterator[tuple[int, RawRow]],
    convert: Convert,
    schema: pyarrow.Schema,
    source: str,
    count: int | None = None,
) -> dict[str, Any]:
    """Write the converted rows and the rows that are left out; return digest and counts.

    `count` is the number of `rows`, or None if it is unknown.
    """
    digest = sha256()
    counts: dict[str, int] = {}
    first: dict[str, Any] | None = None
    total = 0
    types = schema.append(pyarrow.field(ROW, pyarrow.int64()))
    with (
        # Half of a surrogate pair, which cannot be encoded, is written as its escape.
        (folder / _LEFT_OUT).open("w", encoding="utf-8", errors="backslashreplace") as aside,
        (folder / _TABLE).open("wb") as file,
        pyarrow.ipc.new_stream(file, types) as table,
        _progress(source, count) as bar,
    ):
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            kept = []
            for (number, raw), row in zip(batch, convert([raw for _, raw in batch]), strict=True):
                made = attempt(_with_json, row)
                if isinstance(made, RowError):
                    first = first or {ROW: number, "values": _shown(raw), "move": made.move}
                    counts[str(made)] = counts.get(str(made), 0) + 1
                    entry = {ROW: number, "reason": str(made), "values": raw}
                    aside.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
                    continue
                for one, text in made:
                    digest.update(text.encode())
                    kept.append({**one, ROW: number})
            table.write_batch(pyarrow.RecordBatch.from_pylist(kept, types))
            total += len(batch)
            bar.update(len(batch))
    return {
        "digest": digest.hexdigest()[:16],
        "left_out": counts,
        "first_left_out": first,
        "total": total,
    }


def _with_json(row: Row | Sequence[Row] | RowError | None) -> list[tuple[Row, str]]:
    """Return the converted rows, each with its JSON text.

    Raises:
        RowError: the row is left out, or a text of the row cannot be encoded.
    """
    if isinstance(row, RowError):
        raise row
    made = [(one, _AS_JSON(one)) for one in ([row] if isinstance(row, Mapping) else row or ())]
    if any(has_half_character(text) for _, text in made):
        raise RowError("with half of a surrogate pair, which is not a character")
    return made


def _progress(source: str, count: int | None) -> tqdm:
    # torchrun and accelerate set RANK. All processes read the rows; only the first shows the bar.
    hidden = os.environ.get("RANK", "0") != "0"
    description = f"preparing {Path(source).name:.40}"
    return progress(count, description, "row", hidden=hidden, delay=BAR_DELAY)


def _shown(raw: RawRow) -> str:
    # Unlike a slice, `Repr` closes the quotes of a text that it shortens.
    brief = Repr()
    brief.maxstring = brief.maxother = 60
    shown = ", ".join(
        f"{key}: {brief.repr(value)}"
        for key, value in raw.items()
        if key != ROW and value is not None
    )
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]} ..."


def _used(facts: Mapping[str, Any]) -> Fraction:
    """Return the fraction of the rows that a conversion did not leave out."""
    total, left_out = facts["total"], sum(facts["left_out"].values())
    return Fraction(total - left_out, total) if left_out else Fraction(1)


def _check_left_out(made: Cached, source: str, limit: float, rows: Rows | None = None) -> None:
    """Raise if more than a fraction `limit` of the rows is left out.

    `rows` are the rows that this conversion read; None for the rows of a file.

    Raises:
        TooManyLeftOutError: too many rows are left out; the message names the limit that would
            allow them.
    """
    total, counts, first = (made.values[key] for key in ("total", "left_out", "first_left_out"))
    left_out = sum(counts.values())
    used_before = Fraction(1) if rows is None else rows.used
    fraction = float(1 - used_before * _used(made.values))
    if not left_out or fraction <= limit:
        return
    before = ""
    if rows is not None and rows.left_out:
        before = (
            f" Rows left out before: {sum(rows.left_out.values())} "
            f"({100 * float(1 - used_before):.3g}%). Of the data set, {100 * fraction:.3g}% are "
            "left out."
        )
    without_them = f", or set max_left_out={_passing(fraction)} to go on without these rows"
    raise TooManyLeftOutError(
        f"{left_out} of the {total} rows of '{source}' cannot be used: "
        f"{list_reasons(counts)}. The first is row {first[ROW]}, counted from 0: "
        f"{first['values']}.{before} At most {100 * limit:g}% of the rows may be left out "
        f"(max_left_out={limit:g}). {first['move'].removesuffix('.')}"
        f"{without_them if fraction < 1 else ''}.",
        (*(() if rows is None else rows.left_out_files), made.path / _LEFT_OUT),
    )


def _passing(fraction: float) -> float:
    """Return a value of `max_left_out` that allows leaving out this fraction of the rows.

    The value is the fraction rounded up to three decimals, or the exact fraction if rounding up
    gives 1.
    """
    rounded = math.ceil(fraction * 1000) / 1000
    return rounded if rounded < 1 else fraction
