"""Find the next pair of answers that a person should label, and save the person's labels."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

from pipeline.inputs.human_labels_to_pairs import Vote
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.data.sources.json_rows import read_json_rows
from ppo_core.errors import DataError
from ppo_core.io.atomic_files import explained_writes, write_atomically

SKIP = "skip"

CHOICES = ("left", "right", "tie", SKIP)
"""Choices of a person for a pair."""

_Texts: TypeAlias = tuple[str, str, str]
"""The prompt as JSON, and the two answers."""


@dataclass
class Labeling:
    """The pairs of a file, and one person's labels; each label is saved immediately.

    Several people may write labels to the same file at the same time.
    """

    pairs: list[Vote]
    """The pairs to label; labels that they already have are ignored."""

    annotator: str
    """Id of the person."""

    file: Path
    """File of the labels of all persons."""

    skipped: set[_Texts] = field(default_factory=set, init=False)
    """Pairs that the person skipped; they are shown again after `undo` or a restart."""

    labeled: set[_Texts] = field(init=False)
    """Pairs that this person has labeled."""

    _actions: list[_Texts | None] = field(default_factory=list, init=False)
    """The person's actions since the start: the texts of a skipped pair, or None for a label."""

    def __post_init__(self) -> None:
        """Continue from the labels in the file, if it exists."""
        self._texts = [_texts_of(vars(pair)) for pair in self.pairs]
        self._set_labeled(self._saved())

    @property
    def done(self) -> int:
        """Number of pairs that this person has labeled or skipped."""
        return sum(texts in self.labeled or texts in self.skipped for texts in self._texts)

    def state(self) -> dict[str, Any]:
        """Return the next pair as the page expects it, and the number of finished pairs."""
        left = (
            number
            for number, texts in enumerate(self._texts)
            if texts not in self.labeled and texts not in self.skipped
        )
        number = next(left, None)
        shown = None
        if number is not None:
            sides = self._sides(number)
            prompt = shown_prompt(self.pairs[number].prompt)
            shown = {"number": number, "prompt": prompt, "left": sides[0], "right": sides[1]}
        return {"pair": shown, "done": self.done, "total": len(self.pairs)}

    def label(self, number: int, choice: str) -> None:
        """Save the person's choice for a pair; ignore a second label for the same pair.

        Raises:
            DataError: there is no such pair or choice.
            TrainingError: the file cannot be written.
        """
        if choice not in CHOICES or not 0 <= number < len(self.pairs):
            raise DataError(f"There is no choice {choice!r:.40} for a pair {number!r:.40}.")
        texts, pair = self._texts[number], self.pairs[number]
        if choice == SKIP:
            if texts not in self.skipped:
                self.skipped.add(texts)
                self._actions.append(texts)
        elif texts not in self.labeled:
            row = {
                **label_row(pair, choice, self.annotator, left=self._sides(number)[0]),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            }

            def with_row(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
                # The same person may have labeled the pair in another process.
                if any(self._is_own(one) and _texts_of(one) == texts for one in rows):
                    return rows
                self._actions.append(None)
                return [*rows, row]

            self._change(with_row)

    def undo(self) -> None:
        """Take back the person's last skip or label for one of `pairs`, if there is one.

        Once all actions since the start are taken back, further calls take back the labels that the
        file had before, the newest first.
        """
        if self._actions and (skipped := self._actions[-1]) is not None:
            self.skipped.remove(skipped)
            self._actions.pop()
            return
        own = {*self._texts}

        def without_last(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            last = max(
                (n for n, row in enumerate(rows) if self._is_own(row) and _texts_of(row) in own),
                default=len(rows),
            )
            return rows[:last] + rows[last + 1 :]

        self._change(without_last)
        del self._actions[-1:]

    def _sides(self, number: int) -> tuple[str, str]:
        return sides_of(self.pairs[number], self.annotator)

    def _change(self, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Apply `change` to the rows of the file under a lock, and write the result."""
        with explained_writes(self.file), FileLock(f"{self.file}.lock"):
            rows = change(self._saved())
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_atomically(self.file, lines)
        self._set_labeled(rows)

    def _saved(self) -> list[dict[str, Any]]:
        return [dict(row) for row in read_json_rows(self.file)] if self.file.exists() else []

    def _set_labeled(self, rows: list[dict[str, Any]]) -> None:
        self.labeled = {_texts_of(row) for row in rows if self._is_own(row)}

    def _is_own(self, row: Mapping[str, Any]) -> bool:
        return row.get("annotator") == self.annotator


def sides_of(pair: Vote, annotator: str) -> tuple[str, str]:
    """Return the left and the right answer, which are exchanged in about half of the pairs.

    A hash of the pair and of the annotator decides, so an annotator always sees a pair in the same
    order.
    """
    text = json.dumps([*_texts_of(vars(pair)), annotator])
    is_swapped = blake2b(text.encode(), digest_size=1).digest()[0] % 2
    return (pair.second, pair.first) if is_swapped else (pair.first, pair.second)


def label_row(pair: Vote, choice: str, annotator: str | None, *, left: str) -> dict[str, Any]:
    """Return the row to save after a person chose `left`, `right` or `tie` for a pair.

    The argument `left` is the answer that was shown on the left.
    """
    label = "tie"
    if choice != "tie":
        label = "first" if (choice == "left") == (left == pair.first) else "second"
    vote = replace(pair, label=label, annotator=annotator)
    return {
        "prompt": vote.prompt,
        "first": vote.first,
        "second": vote.second,
        "label": vote.label,
        # With these columns, the file can be used as preferences, too.
        "chosen": vote.chosen,
        "rejected": vote.rejected,
        "tie": label == "tie",
        "annotator": annotator,
    }


def _texts_of(row: Mapping[str, Any]) -> _Texts:
    return json.dumps(row.get("prompt")), str(row.get("first")), str(row.get("second"))
