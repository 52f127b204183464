"""Settings for reading rows: prompt format, rows that are too long, and names of columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ppo_core.errors import ConfigError

PromptFormat: TypeAlias = Literal["auto", "chat", "text"]
"""How a policy reads prompts: "chat" renders them with the tokenizer's chat template, "text" takes
them as text, and "auto" is "chat" if the tokenizer has a template."""

Overlong: TypeAlias = Literal["error", "drop", "truncate"]
"""What happens to a row that is too long for the model: "error" stops with an error, "drop" leaves
the row out, and "truncate" removes the start of the prompt."""

MAX_LEFT_OUT = 0.01
"""Default of `max_left_out`, the maximum fraction of a data set's rows that may be left out."""

LABEL_FIELDS = ("margin", "tie", "category", "source", "annotator")
"""Optional fields of preferences: the rating difference between the responses, whether people
prefer neither, the kind of the pair, the origin of the pair, and the id of the voter."""

VOTE_FIELDS = ("first", "second", "label")
"""Fields of a vote, besides the prompt: two answers, and which answer a person prefers."""

RANKING_FIELDS = ("responses", "ranks", "scores")
"""Fields of a ranked list, besides the prompt: the responses, and either their ranks (the smallest
is the best) or their scores (the largest is the best)."""

FIELDS = (
    *("prompt", "chosen", "rejected", "completion", "reference", "messages"),
    *VOTE_FIELDS,
    *RANKING_FIELDS,
    *LABEL_FIELDS,
)


@dataclass(frozen=True)
class ReadOptions:
    """How a command reads its data sets."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Field -> column, see `ppo_core.data.rows.row_formats.find_row_format`."""

    allow_urls: bool = False
    """Whether a data set may be an address."""

    max_left_out: float = MAX_LEFT_OUT
    """Maximum fraction of the rows that may be left out, in all conversions together."""


DEFAULT_READING = ReadOptions()
"""No renamed columns, no addresses, and the default of `max_left_out`."""


def parse_columns(pairs: Sequence[str] | None) -> dict[str, str]:
    """Return field -> column for flags such as `prompt=post`.

    Raises:
        ConfigError: a flag has no equals sign or no column, or its field is unknown or given twice.
    """
    found = [pair.partition("=") for pair in pairs or ()]
    if wrong := [field for field, sign, column in found if not (sign and column)]:
        raise ConfigError(f"columns: {wrong[0]!r} has no column. Write FIELD=COLUMN.")
    fields = [field for field, _, _ in found]
    if twice := [field for field in fields if fields.count(field) > 1]:
        raise ConfigError(f"columns: {twice[0]!r} is given twice. Name one column for it.")
    columns = {field: column for field, _, column in found}
    check_columns(columns)
    return columns


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise unless every key is a field of rows.

    Raises:
        ConfigError: a key is not a field of rows.
    """
    if unknown := [field for field in columns if field not in FIELDS]:
        raise ConfigError(
            f"columns: {unknown[0]!r} is not a field that can be renamed. The fields are "
            f"{', '.join(FIELDS)}."
        )
