"""Find the column of each field in a data set, and convert the rows to one form.

The columns of these published data sets are known: TRL and UltraFeedback (prompt, chosen, rejected,
messages), ShareGPT (conversations), HH (turns in one text), Alpaca (instruction, input, output),
TL;DR's comparisons (info, summaries, choice), KTO (completion, label), and ranked lists (responses
with ranks or scores).
"""

import math
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, Literal, TypeAlias

import pyarrow

from ppo_core.config.field_checks import is_finite
from ppo_core.config.row_settings import FIELDS, LABEL_FIELDS, VOTE_FIELDS
from ppo_core.config.spelling import nearest_name
from ppo_core.data.chat_template import is_messages
from ppo_core.data.rows.dialogues import (
    as_prompt,
    as_response,
    as_turns,
    is_answered,
    last_answer,
    split_pair,
)
from ppo_core.data.rows.messages import plain_messages
from ppo_core.data.rows.rankings import pairs_of_ranking
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.sources.raw_row import RawRow
from ppo_core.errors import DataError

Kind: TypeAlias = Literal["prompts", "pairs", "demonstrations", "votes", "feedback"]
"""Use of a data set: prompts with an optional reference, preferences, examples for fine-tuning,
pairs of answers that people judged, or feedback of users on single answers or pairs."""

_CONVERSATIONS = ("messages", "conversations")
"""Columns that may hold a conversation, with or without an answer; ShareGPT has `conversations`."""

_PROMPT_COLUMNS = ("prompt", "query", "question", "instruction", *_CONVERSATIONS)
"""Names of columns that may hold the prompt; the first column that exists is read."""

_COMPLETION_COLUMNS = ("completion", "output", "answer", "response", "reference_response")
"""Names of columns that may hold the response in a demonstration."""

_REFERENCE_COLUMNS = ("reference", *_COMPLETION_COLUMNS)
"""Names of columns that may hold the reference with which a policy's response is compared."""

WEIGHT = "weight"
"""Optional column of feedback, of pairs and of encoded pairs: the weight of the row in the loss."""

_RANKING_COLUMNS = {
    "responses": ("responses", "completions"),
    "ranks": ("ranks", "rank"),
    "scores": ("scores", "ratings"),
}
"""Field of a ranked list -> names of columns that may hold it; the first that exists is read."""

_TEXT = pyarrow.string()
_MESSAGES = pyarrow.list_(pyarrow.struct({"role": _TEXT, "content": _TEXT}))
_TOKEN_IDS = pyarrow.list_(pyarrow.int64())

_LABELS = {
    **dict.fromkeys(LABEL_FIELDS, _TEXT),
    "margin": pyarrow.float64(),
    "tie": pyarrow.bool_(),
}
"""Types of the optional fields of preferences."""

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


_COMMON = "the common part of chosen and rejected"

_Field: TypeAlias = tuple[str, Callable[[RawRow], Any]]
"""Names of the columns of a field, as one text, and the function that reads the field."""


def find_row_format(
    kind: Kind,
    columns: Collection[str],
    *,
    is_chat: bool,
    takes_token_ids: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> RowFormat:
    """Return the form of rows with the given columns.

    Args:
        kind: use of the data set.
        columns: names of the columns.
        is_chat: whether prompts become messages; if False, prompts remain text.
        takes_token_ids: whether prompts may be token ids, in the column `input_ids`.
        renamed: field -> column, for fields whose columns have other names.

    Raises:
        DataError: a required column is missing.
    """
    known = {field: name for field, name in (renamed or {}).items() if name in columns}
    names = {*columns, *known}
    finders = {
        "prompts": _prompts,
        "pairs": _pairs,
        "demonstrations": _examples,
        "votes": _votes,
        "feedback": _feedback,
    }
    if kind == "prompts" and takes_token_ids and "input_ids" in names and "prompt" not in known:
        return _token_ids(names)
    form = finders[kind](names, is_chat)
    if not known:
        return form
    reading = {
        field: ", ".join(known.get(name, name) for name in described.split(", "))
        for field, described in form.reading.items()
    }

    def convert(row: RawRow) -> Row | list[Row]:
        return form.convert({**row, **{field: row.get(name) for field, name in known.items()}})

    return replace(form, reading=reading, convert=convert)


def _prompts(columns: Collection[str], is_chat: bool) -> RowFormat:
    described, read = _find_prompt(columns) or _common_prompt(columns)
    is_judged = _are_judgements(columns)
    # In single judgments, the completion may be rejected, so it cannot be the reference.
    known = _REFERENCE_COLUMNS[: 1 if is_judged else None]
    named = [name for name in known if name in columns]
    is_pair = not named and {"chosen", "rejected"} <= set(columns)

    def convert(row: RawRow) -> Row:
        prompt, answer = read(row), None
        if described in _CONVERSATIONS and is_messages(prompt) and is_answered(prompt):
            prompt, answer = last_answer(prompt)
        references = (_text_or_none(row, name) for name in known)
        reference = next((text for text in references if text is not None), None)
        if is_pair:
            reference = _chosen_or_none(row, None if described == _COMMON else prompt, is_chat)
        return {
            "prompt": as_prompt(prompt, is_chat=is_chat),
            "reference": answer if reference is None else reference,
        }

    reading = {"prompt": described}
    if named:
        reading["reference"] = ", ".join(named)
    elif is_pair:
        reading["reference"] = "chosen"
    elif described in _CONVERSATIONS:
        reading["reference"] = "the last message, if it is the assistant's"
    return RowFormat(reading, _schema(is_chat, "reference"), convert)


def _pairs(columns: Collection[str], is_chat: bool) -> RowFormat:
    if {"info", "summaries", "choice"} <= set(columns) and "chosen" not in columns:
        reading = {"prompt": "info", "chosen": "summaries, choice"}
        reading |= {name: name for name in _LABELS if name in columns}
        if "worker" in columns and "annotator" not in columns:
            reading["annotator"] = "worker"
        return RowFormat(reading, _pair_schema(is_chat), lambda row: _tldr_pair(row, is_chat))
    missing = [name for name in ("chosen", "rejected") if name not in columns]
    if missing:
        other = _judgements(columns, is_chat) or _ranking(columns, is_chat)
        if other is None:
            raise _no_columns(missing, columns)
        return other
    described, read = _find_prompt(columns) or (_COMMON, _nothing)
    if described in _CONVERSATIONS:
        read = _messages_beside_answers(described)

    def convert(row: RawRow) -> Row:
        prompt, chosen, rejected = split_pair(
            read(row), _value(row, "chosen"), _value(row, "rejected"), is_chat=is_chat
        )
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **_labels(row)}

    reading = {"prompt": described, "chosen": "chosen", "rejected": "rejected"}
    reading |= {name: name for name in _LABELS if name in columns}
    return RowFormat(reading, _pair_schema(is_chat), convert)


def _are_judgements(columns: Collection[str]) -> bool:
    return {"completion", "label"} <= set(columns)


def _judgements(columns: Collection[str], is_chat: bool) -> RowFormat | None:
    """Return the form of single judgments (KTO, arXiv:2402.01306); None if a column is missing."""
    found = _find_prompt(columns)
    if found is None or not _are_judgements(columns):
        return None
    described, read = found

    def convert(row: RawRow) -> Row:
        label = _truth(row.get("label"), "label")
        if label is None:
            raise RowError("without true or false in label")
        return {
            "prompt": as_prompt(read(row), is_chat=is_chat),
            "completion": as_response(_value(row, "completion"), "completion"),
            "label": label,
            **{name: _name(row.get(name), name) for name in ("category", "source")},
        }

    reading = {"prompt": described, "completion": "completion", "label": "label"}
    reading |= {name: name for name in ("category", "source") if name in columns}
    texts = _schema(is_chat, "completion", "category", "source")
    schema = texts.append(pyarrow.field("label", pyarrow.bool_()))
    return RowFormat(reading, schema, convert, is_judged=True)


def _ranking(columns: Collection[str], is_chat: bool) -> RowFormat | None:
    """Return the form of ranked lists; None if a column is missing."""
    found = _find_prompt(columns)
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


def pair_schema_of(judgements: pyarrow.Schema) -> pyarrow.Schema:
    """Return the schema of preferences that are made from rows with the schema `judgements`."""
    return _pair_schema(is_chat=judgements.field("prompt").type != _TEXT)


def _examples(columns: Collection[str], is_chat: bool) -> RowFormat:
    answered = next((name for name in _COMPLETION_COLUMNS if name in columns), None)
    found = _find_prompt(columns)
    if found and found[0] not in _CONVERSATIONS and answered:
        described, read = found

        def convert(row: RawRow) -> Row:
            return {
                "prompt": as_prompt(read(row), is_chat=is_chat),
                "completion": as_response(_accepted(row, answered), answered),
            }

        reading = {"prompt": described, "completion": answered}
        return RowFormat(reading, _schema(is_chat, "completion"), convert)
    if talk := next((name for name in _CONVERSATIONS if name in columns), None):
        schema = pyarrow.schema({"messages": _MESSAGES})
        return RowFormat({"messages": talk}, schema, lambda row: _conversation(row, talk, is_chat))
    if found:
        raise _no_columns(["completion"], columns)
    if "text" in columns:
        return RowFormat({"text": "text"}, pyarrow.schema({"text": _TEXT}), _text)
    raise _no_columns(["prompt", "completion"], columns)


def _votes(columns: Collection[str], is_chat: bool) -> RowFormat:
    found = _find_prompt(columns)
    missing = [name for name in VOTE_FIELDS if name not in columns]
    if found is None or missing:
        raise _no_columns([*([] if found else ["prompt"]), *missing], columns)
    described, read = found
    # Read this column only if it exists: the digests of data sets without it must not change.
    people = ["annotator"] if "annotator" in columns else []

    def convert(row: RawRow) -> Row:
        answers = {name: as_response(_value(row, name), name) for name in VOTE_FIELDS}
        names = {name: _name(row.get(name), name) for name in people}
        return {"prompt": as_prompt(read(row), is_chat=is_chat), **answers, **names}

    reading = {"prompt": described, **{name: name for name in (*VOTE_FIELDS, *people)}}
    return RowFormat(reading, _schema(is_chat, *VOTE_FIELDS, *people), convert)


def _feedback(columns: Collection[str], is_chat: bool) -> RowFormat:
    """Return the form of feedback: a liked response in chosen, and a disliked one in rejected.

    Either column may be missing. The columns of single judgments (`_judgements`) are read, too.
    """
    found = _find_prompt(columns)
    is_judged = _are_judgements(columns)
    if found is None or not (is_judged or {"chosen", "rejected"} & set(columns)):
        raise _no_columns([*([] if found else ["prompt"]), "chosen", "rejected"], columns)
    described, read = found

    def convert(row: RawRow) -> Row:
        if is_judged:
            if (is_liked := _truth(row.get("label"), "label")) is None:
                raise RowError("without true or false in label")
            row = {**row, "chosen" if is_liked else "rejected": row.get("completion")}
        answers = {
            name: None if (value := _value(row, name)) is None else as_response(value, name)
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
    schema = _schema(is_chat, "chosen", "rejected").append(pyarrow.field(WEIGHT, pyarrow.float64()))
    return RowFormat(reading, schema, convert)


# --- Fields ------------------------------------------------------------------------


def _find_prompt(columns: Collection[str]) -> _Field | None:
    name = next((name for name in _PROMPT_COLUMNS if name in columns), None)
    if name is None:
        return ("info", _tldr_prompt) if "info" in columns else None
    if name == "instruction":
        return "instruction, input" if "input" in columns else name, _instruction
    return name, lambda row: _value(row, name)


def _value(row: RawRow, name: str) -> Any:
    """Return the value of a column, with messages converted to the keys role and content."""
    return plain_messages(row.get(name))


REJECTED = ("false", "0", "0.0")
"""Labels of a rejected completion, as lowercase texts."""


def _accepted(row: RawRow, name: str) -> Any:
    """Return the response of a demonstration.

    Raises:
        RowError: the label of the row rejects the response.
    """
    label = row.get("label")
    if name == "completion" and str(label).lower() in REJECTED:
        raise RowError(
            f"with a rejected completion (label {label})", "Keep the rows whose label is true."
        )
    return _value(row, name)


def _common_prompt(columns: Collection[str]) -> _Field:
    """Return a field that reads the prompt from the common part of chosen and rejected."""
    if not {"chosen", "rejected"} <= set(columns):
        raise _no_columns(["prompt"], columns)

    def read(row: RawRow) -> Any:
        chosen = _value(row, "chosen")
        return split_pair(None, chosen, _value(row, "rejected"), is_chat=is_messages(chosen))[0]

    return _COMMON, read


def _text_or_none(row: RawRow, name: str) -> str | None:
    """Return a reference as text, or None if it cannot be read: training needs no reference."""
    try:
        return as_response(_value(row, name), "the reference")
    except RowError:
        return None


def _chosen_or_none(row: RawRow, prompt: Any, is_chat: bool) -> str | None:
    """Return the preferred response of a pair as text, or None if the pair cannot be read."""
    try:
        chosen, rejected = _value(row, "chosen"), _value(row, "rejected")
        return split_pair(prompt, chosen, rejected, is_chat=is_chat)[1]
    except RowError:
        return None


def _nothing(row: RawRow) -> None:
    return None


def _messages_beside_answers(column: str) -> Callable[[RawRow], Any]:
    """Return a function that reads a column's messages without the answer at their end.

    The function returns None if the column has no messages, or if `chosen` is a whole conversation,
    because `chosen` then includes these messages.
    """

    def read(row: RawRow) -> Any:
        messages, chosen = _value(row, column), _value(row, "chosen")
        if (is_messages(chosen) and len(chosen) > 1) or not is_messages(messages):
            return None
        return last_answer(messages)[0] if is_answered(messages) else messages

    return read


def _instruction(row: RawRow) -> Any:
    instruction, context = row.get("instruction"), row.get("input")
    if context is None or context == "":
        return instruction
    if not (isinstance(instruction, str) and isinstance(context, str)):
        raise RowError("without two texts in instruction and input")
    return f"{instruction}\n\n{context}"


def _tldr_prompt(row: RawRow) -> str:
    """Return the query of a Reddit post, as in Stiennon et al., 2020 (arXiv:2009.01325)."""
    info = row.get("info")
    if not isinstance(info, Mapping) or not isinstance(info.get("post"), str):
        raise RowError("without a post in info")
    return (
        f"SUBREDDIT: r/{info.get('subreddit') or ''}\n\nTITLE: {info.get('title') or ''}\n\n"
        f"POST: {info['post']}\n\nTL;DR:"
    )


def _tldr_pair(row: RawRow, is_chat: bool) -> Row:
    summaries: Any = row.get("summaries")
    choice: Any = row.get("choice")
    two = isinstance(summaries, list) and len(summaries) == 2
    if not (two and type(choice) is int and choice in (0, 1)):
        raise RowError("without two summaries and a choice of 0 or 1")
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in summaries]
    return {
        "prompt": as_prompt(_tldr_prompt(row), is_chat=is_chat),
        "chosen": as_response(texts[choice], "summaries"),
        "rejected": as_response(texts[1 - choice], "summaries"),
        **_labels({"annotator": row.get("worker"), **row}),
    }


def _conversation(row: RawRow, column: str, is_chat: bool) -> Row:
    messages = _value(row, column)
    if not is_messages(messages):
        raise RowError(f"without messages in {column}")
    if is_chat and is_answered(messages[:1]):
        raise RowError("with a conversation that begins with an answer of the assistant")
    as_prompt(messages[:1], is_chat=is_chat)
    if not any(turn.get("role") == "assistant" for turn in messages):
        raise RowError("without an answer of the assistant")
    return {"messages": as_turns(messages)}


def _text(row: RawRow) -> Row:
    if not isinstance(row.get("text"), str):
        raise RowError("without a text")
    return {"text": row["text"]}


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


def _token_ids(columns: Collection[str]) -> RowFormat:
    reading = {"prompt": "input_ids, attention_mask"}
    if "attention_mask" not in columns:
        reading = {"prompt": "input_ids"}

    def convert(row: RawRow) -> Row:
        ids: Any = row.get("input_ids")
        mask: Any = row.get("attention_mask")
        if not _are_integers(ids):
            raise RowError("without token ids in input_ids")
        if mask is None:
            return {"prompt": ids}
        if not _are_integers(mask) or len(mask) != len(ids):
            raise RowError("whose input_ids and attention_mask differ in length")
        return {"prompt": [token for token, seen in zip(ids, mask, strict=True) if seen]}

    return RowFormat(reading, pyarrow.schema({"prompt": _TOKEN_IDS}), convert)


def _are_integers(values: Any) -> bool:
    # bool is a subclass of int.
    return isinstance(values, list) and all(
        type(value) is int and is_finite(value) for value in values
    )


# --- Types and errors --------------------------------------------------------------


def _schema(is_chat: bool, *texts: str) -> pyarrow.Schema:
    prompt = _MESSAGES if is_chat else _TEXT
    return pyarrow.schema({"prompt": prompt, **dict.fromkeys(texts, _TEXT)})


def _pair_schema(is_chat: bool) -> pyarrow.Schema:
    fields = [
        *_schema(is_chat, "chosen", "rejected"),
        *map(pyarrow.field, _LABELS, _LABELS.values()),
    ]
    return pyarrow.schema(fields)


def _no_columns(missing: list[str], columns: Collection[str]) -> DataError:
    alternatives = {"prompt": _PROMPT_COLUMNS, "completion": _COMPLETION_COLUMNS}
    also = [name for field in missing for name in alternatives.get(field, ())[1:]]
    shown = shorten(", ".join(sorted(columns)), 300)
    hint = f" (other accepted names: {', '.join(also)})" if also else ""
    free = set(columns) - set(FIELDS)
    near = {name: column for name in missing if (column := nearest_name(name, free))}
    given = [f"{name}={column}" for name, column in near.items()]
    meant = f" Did you mean {', '.join(near.values())}?" if near else ""
    of_flow = " ".join(f"--set {shlex.quote(f'columns.{one}')}" for one in given)
    option = f": {of_flow} for a run of the flow, --columns {shlex.join(given)} for other commands"
    return DataError(
        f"There is no column {', '.join(missing)}{hint}; the columns are {shown}.{meant} Rename a "
        f"column, or give its name in the setting columns{option if near else ''}."
    )
