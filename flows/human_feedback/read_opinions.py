"""Read the opinions of users from a file of votes or judgments."""

from datetime import UTC, datetime

from human_feedback.opinions import LeftOut, Opinion, size_fault, time_of
from pipeline.inputs.human_labels_to_pairs import Vote
from ppo_core.config.row_settings import VOTE_FIELDS
from ppo_core.data.chat_template import is_messages
from ppo_core.data.rows.messages import plain_messages
from ppo_core.data.rows.read_rows import Rows, read_source
from ppo_core.data.rows.row_columns import Row, RowFormat
from ppo_core.data.rows.row_error import RowError, attempt
from ppo_core.data.rows.row_formats import Kind, find_row_format
from ppo_core.data.sources.raw_row import RawRow
from ppo_core.data.sources.source import named_data, open_source


def read_votes(source: str, since: datetime | None = None) -> tuple[list[Opinion], list[LeftOut]]:
    """Return the opinions in a file, and the rows that are left out.

    A row has `prompt` and an opinion in one of three forms: `first`, `second` and `label` (first,
    second or tie); `completion` and `label` (true or false); or `chosen` and `rejected`, one of
    which may be missing. A row may also have `annotator`, `version` and `time` (ISO 8601, or
    seconds since 1970). A row whose time is before `since` is left out.

    Raises:
        DataError: the file cannot be read, or a column is missing.
    """
    rows = list(open_source(source).rows())
    with named_data(source):
        columns = dict.fromkeys(name for row in rows for name in row)
        kind: Kind = "votes" if set(VOTE_FIELDS) <= set(columns) else "feedback"
        form = find_row_format(kind, columns, is_chat=any(map(_has_messages, rows)))
    opinions, left_out = [], []
    for number, row in enumerate(rows):
        place = f"{source}, row {number}"
        one = _opinion(row, form, place)
        if isinstance(one, Opinion) and since and one.time and one.time < since:
            one = LeftOut(place, f"the opinion is from before {since.isoformat()}", one.user)
        if isinstance(one, LeftOut):
            left_out.append(one)
        else:
            opinions.append(one)
    return opinions, left_out


def read_pairs(source: str) -> Rows:
    """Read rows with `prompt`, `first`, `second` and a `label`, which may be empty.

    Raises:
        DataError: the file cannot be read, or a column is missing.
    """
    opened = open_source(source)
    return read_source(opened, "votes", is_chat=any(map(_has_messages, opened.rows())))


def _opinion(raw: RawRow, form: RowFormat, place: str) -> Opinion | LeftOut:
    annotator = raw.get("annotator")
    user = "" if annotator is None else str(annotator)
    row = attempt(form.convert, raw)
    if isinstance(row, RowError):
        return LeftOut(place, str(row), user)
    if isinstance(row, list):
        return LeftOut(place, "a ranked list is not an opinion of one user", user)
    answers = _answers(row)
    if answers is None:
        return LeftOut(place, "the label is a tie, or none of first, second and tie", user)
    if fault := size_fault(row["prompt"], *answers):
        return LeftOut(place, fault, user)
    try:
        time = _time(raw.get("time"))
    except (ValueError, OverflowError, OSError):
        given = f"{raw.get('time')!r:.60}"
        return LeftOut(place, f"the time {given} is neither ISO 8601 nor seconds", user)
    return Opinion(
        prompt=row["prompt"],
        liked=answers[0],
        disliked=answers[1],
        user=user,
        version=str(raw.get("version") or ""),
        time=time,
        source=place,
    )


def _has_messages(row: RawRow) -> bool:
    return any(is_messages(plain_messages(value)) for value in row.values())


def _answers(row: Row) -> tuple[str | None, str | None] | None:
    """Return the preferred answer and the other answer of a row; None if neither is preferred."""
    if "label" not in row:
        return row["chosen"], row["rejected"]
    vote = Vote.of(row)
    return (vote.chosen, vote.rejected) if vote.label in ("first", "second") else None


def _time(value: object) -> datetime | None:
    if value is None or value == "":
        return None
    if isinstance(value, int | float):
        return time_of(int(value * 1000))
    try:
        found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        # In a CSV file, seconds are text.
        return time_of(int(float(str(value)) * 1000))
    return found if found.tzinfo else found.replace(tzinfo=UTC)
