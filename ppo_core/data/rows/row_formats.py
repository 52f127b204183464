"""Choose how the rows of a data set are read; read prompts and examples for fine-tuning."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import pyarrow

from ppo_core.config.field_checks import is_finite
from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.rows.dialogues import (
    as_prompt,
    as_response,
    as_turns,
    is_answered,
    last_answer,
    split_pair,
)
from ppo_core.data.rows.pair_formats import (
    find_feedback,
    find_pairs,
    find_votes,
    repeat_their_prompt,
)
from ppo_core.data.rows.row_columns import (
    COMMON_PART,
    COMPLETION_COLUMNS,
    CONVERSATIONS,
    MESSAGES,
    TEXT,
    Field,
    Row,
    RowFormat,
    find_prompt,
    has_judgments,
    no_columns,
    prompt_schema,
    value_of,
)
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.sources.raw_row import RawRow

Kind: TypeAlias = Literal["prompts", "pairs", "demonstrations", "votes", "feedback"]
"""Use of a data set: prompts with an optional reference, preferences, examples for fine-tuning,
pairs of answers that people judged, or feedback of users on single answers or pairs."""

_REFERENCE_COLUMNS = ("reference", *COMPLETION_COLUMNS)
"""Names of columns that may hold the reference with which a policy's response is compared."""

_TOKEN_IDS = pyarrow.list_(pyarrow.int64())


def find_row_format(
    kind: Kind,
    columns: Collection[str],
    *,
    is_chat: bool,
    takes_token_ids: bool = False,
    renamed: Mapping[str, str] | None = None,
    first: Sequence[RawRow] = (),
) -> RowFormat:
    """Return the form of rows with the given columns.

    Args:
        kind: use of the data set.
        columns: names of the columns.
        is_chat: whether prompts become messages; if False, prompts remain text.
        takes_token_ids: whether prompts may be token ids, in the column `input_ids`.
        renamed: field -> column, for fields whose columns have other names.
        first: first rows of the data set, which show whether responses repeat their prompts.

    Raises:
        DataError: a required column is missing.
    """
    known = {field: name for field, name in (renamed or {}).items() if name in columns}
    names = {*columns, *known}

    def as_known(row: RawRow) -> RawRow:
        return {**row, **{field: row.get(name) for field, name in known.items()}}

    repeats_prompt = repeat_their_prompt([as_known(row) for row in first], names)
    finders: dict[Kind, Callable[[Collection[str], bool], RowFormat]] = {
        "prompts": partial(_prompts, repeats_prompt=repeats_prompt),
        "pairs": partial(find_pairs, repeats_prompt=repeats_prompt),
        "demonstrations": _examples,
        "votes": find_votes,
        "feedback": find_feedback,
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
    return replace(form, reading=reading, convert=lambda row: form.convert(as_known(row)))


def _prompts(columns: Collection[str], is_chat: bool, *, repeats_prompt: bool) -> RowFormat:
    described, read = find_prompt(columns) or _common_prompt(columns)
    is_judged = has_judgments(columns)
    # In single judgments, the completion may be rejected, so it cannot be the reference.
    known = _REFERENCE_COLUMNS[: 1 if is_judged else None]
    named = [name for name in known if name in columns]
    is_pair = not named and {"chosen", "rejected"} <= set(columns)

    def convert(row: RawRow) -> Row:
        prompt, answer = read(row), None
        if described in CONVERSATIONS and is_messages(prompt) and is_answered(prompt):
            prompt, answer = last_answer(prompt)
        references = (_text_or_none(row, name) for name in known)
        reference = next((text for text in references if text is not None), None)
        if is_pair:
            given = None if described == COMMON_PART else prompt
            if pair := _prompt_and_chosen(row, given, is_chat, repeats_prompt):
                prompt, reference = pair
        return {
            "prompt": as_prompt(prompt, is_chat=is_chat),
            "reference": _none_if_blank(answer if reference is None else reference),
        }

    reading = {"prompt": described}
    if named:
        reading["reference"] = ", ".join(named)
    elif is_pair:
        reading["reference"] = "chosen"
    elif described in CONVERSATIONS:
        reading["reference"] = "the last message, if it is the assistant's"
    return RowFormat(reading, prompt_schema(is_chat, "reference"), convert)


def _examples(columns: Collection[str], is_chat: bool) -> RowFormat:
    answered = next((name for name in COMPLETION_COLUMNS if name in columns), None)
    found = find_prompt(columns)
    if found and found[0] not in CONVERSATIONS and answered:
        described, read = found

        def convert(row: RawRow) -> Row:
            return {
                "prompt": as_prompt(read(row), is_chat=is_chat),
                "completion": as_response(_accepted(row, answered), answered),
            }

        reading = {"prompt": described, "completion": answered}
        return RowFormat(reading, prompt_schema(is_chat, "completion"), convert)
    if talk := next((name for name in CONVERSATIONS if name in columns), None):
        schema = pyarrow.schema({"messages": MESSAGES})
        reading = {"messages": f"{talk}, {answered}" if answered else talk}
        return RowFormat(reading, schema, lambda row: _conversation(row, talk, answered, is_chat))
    if found:
        raise no_columns(["completion"], columns)
    if "text" in columns:
        return RowFormat({"text": "text"}, pyarrow.schema({"text": TEXT}), _text)
    raise no_columns(["prompt", "completion"], columns)


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
    return value_of(row, name)


def _common_prompt(columns: Collection[str]) -> Field:
    """Return a field that reads the prompt from the common part of chosen and rejected."""
    if not {"chosen", "rejected"} <= set(columns):
        raise no_columns(["prompt"], columns)

    def read(row: RawRow) -> Any:
        chosen, rejected = value_of(row, "chosen"), value_of(row, "rejected")
        is_chat = is_messages(chosen)
        return split_pair(None, chosen, rejected, is_chat=is_chat, repeats_prompt=True)[0]

    return COMMON_PART, read


def _text_or_none(row: RawRow, name: str) -> str | None:
    """Return a reference as text, or None if it cannot be read: training needs no reference."""
    try:
        return _none_if_blank(as_response(value_of(row, name), "the reference"))
    except RowError:
        return None


def _none_if_blank(text: str | None) -> str | None:
    """Return the text, or None if it is blank: a cell of a CSV file without a value is ""."""
    return text if text and text.strip() else None


def _prompt_and_chosen(
    row: RawRow, prompt: Any, is_chat: bool, repeats_prompt: bool
) -> tuple[str | Messages, str] | None:
    """Return the prompt and the preferred response of a pair; None if the pair cannot be read."""
    try:
        chosen, rejected = value_of(row, "chosen"), value_of(row, "rejected")
        pair = split_pair(prompt, chosen, rejected, is_chat=is_chat, repeats_prompt=repeats_prompt)
    except RowError:
        return None
    return pair[:2]


def _conversation(row: RawRow, column: str, answered: str | None, is_chat: bool) -> Row:
    """Return a conversation; the column `answered` has the answer if the conversation lacks it."""
    messages = value_of(row, column)
    if not is_messages(messages):
        raise RowError(f"without messages in {column}")
    if answered and row.get(answered) and not is_answered(messages):
        answer = as_response(_accepted(row, answered), answered)
        messages = [*messages, {"role": "assistant", "content": answer}]
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


def _are_integers(values: Any) -> bool:
    # bool is a subclass of int.
    return isinstance(values, list) and all(
        type(value) is int and is_finite(value) for value in values
    )
