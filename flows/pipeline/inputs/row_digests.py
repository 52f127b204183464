"""Digests of rows: record the rows that a run read, and find the rows to erase.

A digest identifies a prompt alone, a prompt with one response, or a prompt with all of its
responses; their order does not matter. A row has several digests. Therefore:

- A prompt alone matches all rows with this prompt.
- A prompt with a completion matches all rows and pairs with this prompt and this response.
- A pair matches equal pairs. A pair may also be read as a prompt with its chosen response, so it
  also matches all rows with these two.
- A conversation for fine-tuning also has the digests of each answer in it and the messages before.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import get_args

import pyarrow
import pyarrow.compute as pc
from pyarrow import parquet

from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.rows.read_rows import ROW, Rows, derive, each
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.rows.row_error import RowError, attempt
from ppo_core.data.rows.row_formats import Kind, find_row_format
from ppo_core.data.sources.raw_row import RawRow
from ppo_core.data.sources.source import open_source
from ppo_core.errors import DataError
from ppo_core.io.atomic_files import explained_writes, replacing
from ppo_core.io.folder_cache import digest_of, digest_of_code

ROWS_FILE = "rows.parquet"
"""File with the columns `data_set`, `digest` and `is_row`. A run stores the file, and so does the
version that the run registers. `is_row` is true for the digest of a whole row. The digests of each
data set are in ascending order."""

DIGEST = pyarrow.binary(16)

_RESPONSES = ("completion", "chosen", "rejected", "first", "second", "reference")


def digest_of_row(row: Row) -> bytes:
    """Return the digest of a converted row: its prompt or text with all of its responses."""
    return _digest(_prompt_of(row), _responses_of(row))


def digests_in(row: Row) -> set[bytes]:
    """Return the digest of a converted row, of its prompt, and of the prompt with each response."""
    prompt, responses = _prompt_of(row), _responses_of(row)
    parts = [responses, *([one] for one in responses), *([[]] if prompt else [])]
    return {_digest(prompt, part) for part in parts} | _digests_of_answers(row)


def _digests_of_answers(row: Row) -> set[bytes]:
    """Return the digests of each prompt in a conversation, alone and with its answer."""
    turns = row.get("messages") or []
    return {
        _digest(_prompt_of({"prompt": turns[:place]}), part)
        for place, turn in enumerate(turns)
        if place and turn["role"] == "assistant"
        for part in ([], [turn["content"]])
    }


def read_digests(source: str, renamed: Mapping[str, str], *, allow_urls: bool) -> list[set[bytes]]:
    """Return the digests of each row of a data set; the rows may have different columns.

    For the arguments see `read_rows`; for the result see `digests_of_raw`.

    Raises:
        DataError: the data cannot be read, or a row has no known columns.
    """
    opened = open_source(source, allow_urls=allow_urls)
    return [
        digests_of_raw(row, f"'{source}', row {number}", renamed)
        for number, row in enumerate(opened.rows())
    ]


def digests_of_raw(row: RawRow, name: str, renamed: Mapping[str, str]) -> set[bytes]:
    """Return the digests of a row, read as each kind of row with its columns, as text and as chat.

    A ranked list has the digest of each of its pairs. A row with a response never has the digest of
    its prompt alone, which would also match other rows. A response that begins with the prompt is
    read in two ways, with and without this beginning: one row does not show whether the responses
    of the data set repeat the prompts (see `repeat_their_prompt`).

    Raises:
        DataError: the row has no known columns, or a value is of a wrong type; the message
            begins with `name`.
    """
    given = {column: value for column, value in row.items() if value is not None}
    converted, errors = [], []
    for is_chat, kind, first in product((False, True), get_args(Kind), ([], [given])):
        try:
            form = find_row_format(kind, given, is_chat=is_chat, renamed=renamed, first=first)
        except DataError:
            continue
        one = attempt(form.convert, given)
        if isinstance(one, RowError):
            errors.append(one)
        else:
            converted += [one] if isinstance(one, Mapping) else one
    if not converted:
        reason = f"it is a row {errors[0]}" if errors else "no known kind of row has these columns"
        raise DataError(
            f"{name}, with the columns {', '.join(given) or 'none'}, cannot be used: {reason}. "
            "Write the row exactly as in its data file, or write only its prompt."
        )
    whole = [one for one in converted if "prompt" not in one or _responses_of(one)]
    return {digest_of_row(one) for one in whole or converted}


def without_erased(rows: Rows, erased: Collection[bytes]) -> Rows:
    """Return the rows that have no digest in `erased`.

    The erased rows are not listed in a file, because that would write their texts again.

    Raises:
        DataError: no row is left.
    """
    if not erased:
        return rows

    def convert(row: Row) -> Row | None:
        if digests_in(row).isdisjoint(erased):
            return {name: value for name, value in row.items() if name != ROW}
        return None

    inputs = {
        "erased": digest_of(sorted(one.hex() for one in erased)),
        "code": digest_of_code(__name__),
    }
    kept = derive(rows, "not-erased", inputs, each(convert))
    if not (gone := len(rows) - len(kept)):
        return rows
    if not len(kept):
        raise DataError(
            f"{rows.source}: `erase` names all {gone} rows, so none is left. Add rows, or correct "
            "the file that `erase` names."
        )
    return replace(kept, source=f"{rows.source}, less {gone} erased")


def write_digests(
    data: Mapping[str, tuple[Rows, Rows]], path: Path, inherited: pyarrow.Table | None = None
) -> None:
    """Write the digests of data sets to a file, see ROWS_FILE.

    Args:
        data: for each data set, the given rows, and the rows that the run reads. Of the read rows,
            only the column ROW is used, because their texts may be shortened or encoded.
        path: file to write.
        inherited: further digests, of rows that trained the models from which the run starts.

    Raises:
        TrainingError: the file cannot be written.
    """
    tables = [_table_of(name, given, read) for name, (given, read) in data.items()]
    if inherited is not None:
        tables.append(inherited)
    with explained_writes(path), replacing(path) as unfinished:
        parquet.write_table(pyarrow.concat_tables(tables), unfinished)


def count_seen(table: pyarrow.Table, rows: Iterable[Collection[bytes]]) -> dict[str, int]:
    """Return how many of the rows are in each data set of `table`, the contents of a ROWS_FILE.

    `rows` contains the digests of each row. The value of the key "" is the number of rows that are
    in any data set. Data sets without such a row are left out.
    """
    asked = [(number, one) for number, digests in enumerate(rows) for one in digests]
    found = table.filter(
        pc.is_in(table["digest"], value_set=pyarrow.array([one for _, one in asked], DIGEST))
    )
    uses: dict[bytes, set[str]] = {}
    for name, digest in zip(*(found[c].to_pylist() for c in ("data_set", "digest")), strict=True):
        uses.setdefault(digest, set()).add(name)
    seen = {(use, number) for number, one in asked if one in uses for use in ("", *uses[one])}
    return dict(sorted(Counter(use for use, _ in seen).items()))


def _table_of(name: str, given: Rows, read: Rows) -> pyarrow.Table:
    taken = set(read.column(ROW))
    digests, whole = [], []
    for row in given:
        if row[ROW] in taken:
            own = digest_of_row(row)
            for one in digests_in(row):
                digests.append(one)
                whole.append(one == own)
    columns = {
        "digest": pyarrow.array(digests, DIGEST),
        "is_row": pyarrow.array(whole, pyarrow.bool_()),
    }
    table = pyarrow.table(columns).group_by("digest").aggregate([("is_row", "any")])
    table = table.rename_columns({"is_row_any": "is_row"}).sort_by("digest")
    names = pyarrow.array([name] * len(table), pyarrow.string())
    return table.select(["digest", "is_row"]).add_column(0, "data_set", names)


def _prompt_of(row: Row) -> str:
    """Return the prompt, the text or the conversation of a row as one text."""
    prompt: str | Messages | None = row.get("prompt") or row.get("text") or row.get("messages")
    if not is_messages(prompt):
        return prompt if isinstance(prompt, str) else ""
    turns = [[turn["role"], turn["content"]] for turn in prompt]
    # A chat model reads a text as one message of the user.
    return turns[0][1] if [role for role, _ in turns] == ["user"] else json.dumps(turns)


def _responses_of(row: Row) -> list[str]:
    return sorted({row[name] for name in _RESPONSES if row.get(name)})


def _digest(prompt: str, responses: list[str]) -> bytes:
    return blake2b(json.dumps([prompt, *responses]).encode(), digest_size=16).digest()
