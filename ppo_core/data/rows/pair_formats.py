"""Convert rows with two answers, or with judgments of answers, to one form.

These are preferences, ranked lists, single judgments, votes of people, and feedback of users.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow

from ppo_core.config.field_checks import is_finite
from ppo_core.config.row_settings import LABEL_FIELDS, VOTE_FIELDS
from ppo_core.data.chat_template import is_messages
from ppo_core.data.rows.dialogues import (
    as_prompt,
    as_response,
    begin_with,
    is_answered,
    last_answer,
    split_pair,
)
from ppo_core.data.rows.rankings import pairs_of_ranking
from ppo_core.data.rows.row_columns import (
    COMMON_PART,
    CONVERSATIONS,
    TEXT,
    WEIGHT,
    Row,
    RowFormat,
    find_prompt,
    has_judgments,
    no_columns,
    prompt_schema,
    tldr_prompt,
    value_of,
)
from ppo_core.data.rows.row_error import RowError, attempt
from ppo_core.data.sources.raw_row import RawRow

_RANKING_COLUMNS = {
    "responses": ("responses", "completions"),
    "ranks": ("ranks", "rank"),
    "scores": ("scores", "ratings"),
}
"""Field of a ranked list -> names of columns that may hold it; the first that exists is read."""

_LABELS = {
    **dict.fromkeys(LABEL_FIELDS, TEXT),
    "margin": pyarrow.float64(),
    "tie": pyarrow.bool_(),
}
"""Types of the optional fields of preferences."""


def find_pairs(columns: Collection[str], is_chat: bool, *, repeats_prompt: bool) -> RowFormat:
    """Return the form of preferences, ranked lists, or single judgments.

    `repeats_prompt` says whether both responses begin with the prompt, see `repeat_their_prompt`.

    Raises:
        DataError: a required column is missing.
    """
    if {"info", "summaries", "choice"} <= set(columns) and "chosen" not in columns:
        reading = {"prompt": "info", "chosen": "summaries, choice"}
        reading |= {name: name for name in _LABELS if name in columns}
        if "worker" in columns and "annotator" not in columns:
            reading["annotator"] = "worker"
        return RowFormat(reading, _pair_schema(is_chat), lambda row: _tldr_pair(row, is_chat))
    missing = [name for name in ("chosen", "rejected") if name not in columns]
    if missing:
        other = _judgments(columns, is_chat) or _ranking(columns, is_chat)
        if other is None:
            raise no_columns(missing, columns)
        return other
    described, read = find_prompt(columns) or (COMMON_PART, _nothing)
    if described in CONVERSATIONS:
        read = _messages_beside_answers(described)

    def convert(row: RawRow) -> Row:
        prompt, chosen, rejected = split_pair(
            read(row),
            value_of(row, "chosen"),
            value_of(row, "rejected"),
            is_chat=is_chat,
            repeats_prompt=repeats_prompt,
        )
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **_labels(row)}

    reading = {"prompt": described, "chosen": "chosen", "rejected": "rejected"}
    reading |= {name: name for name in _LABELS if name in columns}
    return RowFormat(reading, _pair_schema(is_chat), convert)


def repeat_their_prompt(rows: Sequence[RawRow], columns: Collection[str]) -> bool:
    """Return whether chosen and rejected begin with a text prompt in more than half of the rows.

    One row alone does not show it: both answers to "Hello!" may begin with "Hello!".
    """
    found = find_prompt(columns)
    if found is None or not {"chosen", "rejected"} <= set(columns):
        return False

    def repeats(row: RawRow) -> bool:
        prompt, chosen, rejected = attempt(found[1], row), row.get("chosen"), row.get("rejected")
        if not (isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str)):
            return False
        return begin_with(prompt, chosen, rejected)

    return 2 * sum(map(repeats, rows)) > len(rows)


def _judgments(columns: Collection[str], is_chat: bool) -> RowFormat | None:
    """Return the form of single judgments; None if a column is missing."""
    found = find_prompt(columns)
    if found is None or not has_judgments(columns):
        return None
    described, read = found

    def convert(row: RawRow) -> Row:
        label = _truth(row.get("label"), "label")
        if label is None:
            raise RowError("without true or false in label")
        return {
            "prompt": as_prompt(read(row), is_chat=is_chat),
            "completion": as_response(value_of(row, "completion"), "completion"),
            "label": label,
            **{name: _name(row.get(name), name) for name in ("category", "source")},
        }

    reading = {"prompt": described, "completion": "completion", "label": "label"}
    reading |= {name: name for name in ("category", "source") if name in columns}
    texts = prompt_schema(is_chat, "completion", "category", "source")
    schema = texts.append(pyarrow.field("label", pyarrow.bool_()))
    return RowFormat(reading, schema, convert, is_judged=True)


def _ranking(columns: Collection[str], is_chat: bool) -> RowFormat | None:
    """Return the form of ranked lists; None if a column is missing."""
    found = find_prompt(columns)
    named = {
        field: name
        for field, names in _RANKING_COLUMNS.items()
        if (name := next((name for name in names if name in columns), None))
    }
    if found is None or "responses" not in named:
        return None
    described, read = found
    if {"ranks", "scores"} <= set(named):
        del named["scores"]

    def convert(row: RawRow) -> list[Row]:
        prompt = as_prompt(read(row), is_chat=is_chat)
        labels = _labels({**row, "margin": None, "tie": None})
        # Use [] for a missing value: if ranks and scores are both None, `pairs_of_ranking` reads
        # the scores from the responses.
        values = {field: row.get(name) or [] for field, name in named.items()}
        return [
            {**labels, "prompt": prompt, "chosen": better, "rejected": worse, "tie": tie}
            for better, worse, tie in pairs_of_ranking(**values)
        ]

    reading = {"prompt": described, **named}
    reading |= {name: name for name in LABEL_FIELDS[2:] if name in columns}
    return RowFormat(reading, _pair_schema(is_chat), convert)


def pair_schema_of(judgments: pyarrow.Schema) -> pyarrow.Schema:
    """Return the schema of preferences that are made from rows with the schema `judgments`."""
    return _pair_schema(is_chat=judgments.field("prompt").type != TEXT)


def find_votes(columns: Collection[str], is_chat: bool) -> RowFormat:
    """Return the form of pairs of answers that people judged.

    Raises:
        DataError: a required column is missing.
    """
    found = find_prompt(columns)
    missing = [name for name in VOTE_FIELDS if name not in columns]
    if found is None or missing:
        raise no_columns([*([] if found else ["prompt"]), *missing], columns)
    described, read = found
    # Read this column only if it exists: the digests of data sets without it must not change.
    people = ["annotator"] if "annotator" in columns else []

    def convert(row: RawRow) -> Row:
        answers = {name: as_response(value_of(row, name), name) for name in VOTE_FIELDS}
        names = {name: _name(row.get(name), name) for name in people}
        return {"prompt": as_prompt(read(row), is_chat=is_chat), **answers, **names}

    reading = {"prompt": described, **{name: name for name in (*VOTE_FIELDS, *people)}}
    return RowFormat(reading, prompt_schema(is_chat, *VOTE_FIELDS, *people), convert)


def find_feedback(columns: Collection[str], is_chat: bool) -> RowFormat:
    """Return the form of feedback: a liked response in chosen, and a disliked one in rejected.

    Either column may be missing. The columns of single judgments (`_judgments`) are read, too.

    Raises:
        DataError: there is no prompt, or neither response.
    """
    found = find_prompt(columns)
    is_judged = has_judgments(columns)
    if found is None or not (is_judged or {"chosen", "rejected"} & set(columns)):
        raise no_columns([*([] if found else ["prompt"]), "chosen", "rejected"], columns)
    described, read = found

    def convert(row: RawRow) -> Row:
        if is_judged:
            if (is_liked := _truth(row.get("label"), "label")) is None:
                raise RowError("without true or false in label")
            row = {**row, "chosen" if is_liked else "rejected": row.get("completion")}
        answers = {
            name: None if (value := value_of(row, name)) is None else as_response(value, name)
            for name in ("chosen", "rejected")
        }
        if all(answer is None for answer in answers.values()):
            raise RowError("without a response in chosen or rejected")
        if any(answers.values()):
            # A missing value in a CSV file is an empty text.
            answers = {name: answer or None for name, answer in answers.items()}
        weight = _number(row.get(WEIGHT), WEIGHT)
        if weight is not None and weight < 0:
            raise RowError("with a weight below 0")
        prompt = as_prompt(read(row), is_chat=is_chat)
        return {"prompt": prompt, **answers, WEIGHT: 1.0 if weight is None else weight}

    used = ("completion", "label") if is_judged else ("chosen", "rejected")
    reading = {"prompt": described} | {name: name for name in (*used, WEIGHT) if name in columns}
    schema = prompt_schema(is_chat, "chosen", "rejected").append(
        pyarrow.field(WEIGHT, pyarrow.float64())
    )
    return RowFormat(reading, schema, convert)


def _messages_beside_answers(column: str) -> Callable[[RawRow], Any]:
    """Return a function that reads a column's messages without the answer at their end.

    The function returns None if the column has no messages, or if `chosen` is a whole conversation,
    because `chosen` then includes these messages.
    """

    def read(row: RawRow) -> Any:
        messages, chosen = value_of(row, column), value_of(row, "chosen")
        if (is_messages(chosen) and len(chosen) > 1) or not is_messages(messages):
            return None
        return last_answer(messages)[0] if is_answered(messages) else messages

    return read


def _nothing(row: RawRow) -> None:
    return None


def _tldr_pair(row: RawRow, is_chat: bool) -> Row:
    summaries: Any = row.get("summaries")
    choice: Any = row.get("choice")
    two = isinstance(summaries, list) and len(summaries) == 2
    if not (two and type(choice) is int and choice in (0, 1)):
        raise RowError("without two summaries and a choice of 0 or 1")
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in summaries]
    return {
        "prompt": as_prompt(tldr_prompt(row), is_chat=is_chat),
        "chosen": as_response(texts[choice], "summaries"),
        "rejected": as_response(texts[1 - choice], "summaries"),
        **_labels({"annotator": row.get("worker"), **row}),
    }


def _labels(row: RawRow) -> Row:
    """Return the labels of a preference; the value of a missing label is None.

    Raises:
        RowError: a label has the wrong type. Texts of numbers and booleans, as in CSV, are valid,
            and an empty text is a missing label.
    """
    return {
        "margin": _number(row.get("margin"), "margin"),
        "tie": _truth(row.get("tie"), "tie"),
        **{name: _name(row.get(name), name) for name in ("category", "source", "annotator")},
    }


def _pair_schema(is_chat: bool) -> pyarrow.Schema:
    fields = [
        *prompt_schema(is_chat, "chosen", "rejected"),
        *map(pyarrow.field, _LABELS, _LABELS.values()),
    ]
    return pyarrow.schema(fields)


def _number(value: Any, column: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RowError(f"without a finite number in {column}")
    return number


def _truth(value: Any, column: str) -> bool | None:
    if value is None or value == "":
        return None
    known = {"true": True, "false": False}
    truth = known.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(truth, bool):
        raise RowError(f"without true or false in {column}")
    return truth


def _name(value: Any, column: str) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    if column == "annotator" and not isinstance(value, bool) and isinstance(value, int | float):
        if is_finite(value):
            return str(value)
        raise RowError("without a finite number in annotator")
    raise RowError(f"without a text in {column}")
