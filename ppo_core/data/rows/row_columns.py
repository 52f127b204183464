"""Find the columns of a data set, and read the values of a prompt.

The columns of these published data sets are known: TRL and UltraFeedback (prompt, chosen, rejected,
messages), ShareGPT (conversations), HH (turns in one text), Alpaca (instruction, input, output),
TL;DR's comparisons (info, summaries, choice), KTO (completion, label), and ranked lists (responses
with ranks or scores).
"""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, TypeAlias

import pyarrow

from ppo_core.config.row_settings import FIELDS
from ppo_core.config.spelling import nearest_name
from ppo_core.data.rows.messages import plain_messages
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.sources.raw_row import RawRow
from ppo_core.errors import DataError

Row: TypeAlias = Mapping[str, Any]
"""A converted row: field -> value."""


@dataclass(frozen=True)
class RowFormat:
    """How the rows of a data set are read."""

    reading: dict[str, str]
    """Field -> the column or columns from which the field is read."""

    schema: pyarrow.Schema
    """Types of the fields."""

    convert: Callable[[RawRow], Row | list[Row]]
    """Return the converted row, or several rows; raise RowError if the row cannot be used."""

    is_judged: bool = False
    """Whether each row judges a single response; `rankings.pairing` makes pairs of such rows."""


CONVERSATIONS = ("messages", "conversations")
"""Columns that may hold a conversation, with or without an answer; ShareGPT has `conversations`."""

PROMPT_COLUMNS = ("prompt", "query", "question", "instruction", *CONVERSATIONS)
"""Names of columns that may hold the prompt; the first column that exists is read."""

COMPLETION_COLUMNS = ("completion", "output", "answer", "response", "reference_response")
"""Names of columns that may hold the response in a demonstration."""

WEIGHT = "weight"
"""Optional column of feedback, of pairs and of encoded pairs: the weight of the row in the loss."""

COMMON_PART = "the common part of chosen and rejected"
"""Where the prompt of a pair is read from if the pair has no column for it."""

TEXT = pyarrow.string()
MESSAGES = pyarrow.list_(pyarrow.struct({"role": TEXT, "content": TEXT}))

Field: TypeAlias = tuple[str, Callable[[RawRow], Any]]
"""Names of the columns of a field, as one text, and the function that reads the field."""


def find_prompt(columns: Collection[str]) -> Field | None:
    """Return the field of the prompt; None if no column is known to hold prompts."""
    name = next((name for name in PROMPT_COLUMNS if name in columns), None)
    if name is None:
        return ("info", tldr_prompt) if "info" in columns else None
    if name == "instruction":
        return "instruction, input" if "input" in columns else name, _instruction
    return name, lambda row: value_of(row, name)


def value_of(row: RawRow, name: str) -> Any:
    """Return the value of a column, with messages converted to the keys role and content."""
    return plain_messages(row.get(name))


def has_judgments(columns: Collection[str]) -> bool:
    """Return whether each row judges a single response (KTO, arXiv:2402.01306)."""
    return {"completion", "label"} <= set(columns)


def _instruction(row: RawRow) -> Any:
    instruction, context = row.get("instruction"), row.get("input")
    if context is None or context == "":
        return instruction
    if not (isinstance(instruction, str) and isinstance(context, str)):
        raise RowError("without two texts in instruction and input")
    return f"{instruction}\n\n{context}"


def tldr_prompt(row: RawRow) -> str:
    """Return the query of a Reddit post, as in Stiennon et al., 2020 (arXiv:2009.01325)."""
    info = row.get("info")
    if not isinstance(info, Mapping) or not isinstance(info.get("post"), str):
        raise RowError("without a post in info")
    return (
        f"SUBREDDIT: r/{info.get('subreddit') or ''}\n\nTITLE: {info.get('title') or ''}\n\n"
        f"POST: {info['post']}\n\nTL;DR:"
    )


def prompt_schema(is_chat: bool, *texts: str) -> pyarrow.Schema:
    """Return the schema of rows with a prompt and fields of text."""
    prompt = MESSAGES if is_chat else TEXT
    return pyarrow.schema({"prompt": prompt, **dict.fromkeys(texts, TEXT)})


def no_columns(missing: list[str], columns: Collection[str]) -> DataError:
    """Return the error for `missing` fields, with the columns that were probably meant."""
    alternatives = {"prompt": PROMPT_COLUMNS, "completion": COMPLETION_COLUMNS}
    also = [name for field in missing for name in alternatives.get(field, ())[1:]]
    shown = shorten(", ".join(sorted(columns)), 300)
    hint = f" (other accepted names: {', '.join(also)})" if also else ""
    free = set(columns) - set(FIELDS)
    near = {name: column for name in missing if (column := nearest_name(name, free))}
    talks = [column for name in CONVERSATIONS if (column := nearest_name(name, free))]
    if "prompt" in missing and talks:
        near = {"messages": talks[0]}
    given = [f"{name}={column}" for name, column in near.items()]
    meant = f" Did you mean {', '.join(near.values())}?" if near else ""
    of_flow = " ".join(f"--set {shlex.quote(f'columns.{one}')}" for one in given)
    option = f": {of_flow} for a run of the flow, --columns {shlex.join(given)} for other commands"
    return DataError(
        f"There is no column {', '.join(missing)}{hint}; the columns are {shown}.{meant} Rename a "
        f"column, or give its name in the setting columns{option if near else ''}."
    )
