"""Opinions of people on two answers, and their conversion to preference pairs."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import pyarrow

from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.read_rows import Rows, derive, each
from ppo_core.data.rows.row_columns import Row
from ppo_core.io.folder_cache import digest_of_code


@dataclass(frozen=True, kw_only=True)
class Vote:
    """A person's opinion on two answers to a prompt."""

    prompt: str | Messages
    first: str
    second: str

    label: str
    """`first`, `second` or `tie`; `first` means that the first answer is better."""

    annotator: str | None = None
    """Id of the person; None if it is not known."""

    @property
    def chosen(self) -> str:
        """The preferred answer; for a tie, the first one."""
        return self.second if self.label == "second" else self.first

    @property
    def rejected(self) -> str:
        """The other answer."""
        return self.first if self.label == "second" else self.second

    @classmethod
    def of(cls, row: Row) -> "Vote":
        """Return the vote of a row of the kind `votes`."""
        return cls(**{one.name: row[one.name] for one in fields(cls) if one.name in row})


def votes_of(rows: Iterable[Row] | None) -> list[Vote]:
    """Return the votes of rows of the kind `votes`; an empty list if `rows` is None."""
    return [Vote.of(row) for row in rows or ()]


def unlabeled_rows(pairs: Iterable[tuple[str | Messages, str, str]]) -> list[Row]:
    """Return rows for people to label: a prompt, two answers, and an empty label."""
    return [
        {"prompt": prompt, "first": first, "second": second, "label": ""}
        for prompt, first, second in pairs
    ]


def pairs_of_votes(votes: Rows) -> Rows:
    """Return votes on two answers, `first` and `second`, as pairs; the column `tie` marks ties."""

    def convert(row: Row) -> Row:
        vote = Vote.of(row)
        return {
            "prompt": vote.prompt,
            "chosen": vote.chosen,
            "rejected": vote.rejected,
            "tie": vote.label == "tie",
            "annotator": vote.annotator,
        }

    prompt = votes.table.features.arrow_schema.field("prompt")
    names = ("chosen", "rejected", "annotator")
    texts = [pyarrow.field(name, pyarrow.string()) for name in names]
    schema = pyarrow.schema([prompt, *texts, pyarrow.field("tie", pyarrow.bool_())])
    return derive(votes, "voted-pairs", {"code": digest_of_code(__name__)}, each(convert), schema)
