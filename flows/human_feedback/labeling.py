"""Pairs of answers that a person labels: the next pair, the labels so far, and their file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.rows.reader import Rows
from ppo_core.data.sources.json_rows import read_json_rows
from ppo_core.errors import DataError
from ppo_core.io.atomic_files import explained_writes, write_atomically

SKIP = "skip"

CHOICES = ("left", "right", "tie", SKIP)
"""What a person can say about a pair."""


@dataclass
class Labeling:
    """The pairs of a file, and one person's labels, which are saved after each label."""

    pairs: list[Mapping[str, Any]]
    """Rows with `prompt`, `first` and `second`."""

    annotator: str
    """Id of the person."""

    file: Path
    """File of the labels of all persons."""

    saved: list[dict[str, Any]] = field(default_factory=list)
    """The rows of the file, in the order of the labels."""

    @classmethod
    def of(cls, rows: Rows, annotator: str, file: Path) -> "Labeling":
        """Return the labeling of rows, continued from the file if it exists.

        Raises:
            DataError: the file cannot be read.
        """
        saved = [dict(row) for row in read_json_rows(file)] if file.exists() else []
        return cls([*rows], annotator, file, saved)

    @property
    def done(self) -> int:
        """Number of pairs that this person has labeled or skipped."""
        return sum(self._is_done(pair) for pair in self.pairs)

    def state(self) -> dict[str, Any]:
        """Return the next pair as the page shows it, and how many are done."""
        number = next((n for n, pair in enumerate(self.pairs) if not self._is_done(pair)), None)
        shown = None
        if number is not None:
            left, right = self._sides(self.pairs[number])
            prompt = as_text(self.pairs[number]["prompt"])
            shown = {"number": number, "prompt": prompt, "left": left, "right": right}
        return {"pair": shown, "done": self.done, "total": len(self.pairs)}

    def label(self, number: int, choice: str) -> None:
        """Save what the person says about a pair; a repeated label of one pair is ignored.

        Raises:
            DataError: there is no such pair or choice.
            TrainingError: the file cannot be written.
        """
        if choice not in CHOICES or not 0 <= number < len(self.pairs):
            raise DataError(f"There is no choice {choice!r:.40} for a pair {number!r:.40}.")
        pair = self.pairs[number]
        if self._is_done(pair):
            return
        left, _ = self._sides(pair)
        first_is_left = left == pair["first"]
        by_side = {"left": first_is_left, "right": not first_is_left}
        label = "" if choice == SKIP else "tie"
        if choice in by_side:
            label = "first" if by_side[choice] else "second"
        chosen, rejected = ("second", "first") if label == "second" else ("first", "second")
        row = {
            **{name: pair[name] for name in ("prompt", "first", "second")},
            "label": label,
            # With these columns, the file can be used as preferences, too.
            "chosen": pair[chosen],
            "rejected": pair[rejected],
            "tie": label in ("tie", ""),
            "annotator": self.annotator,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._save([*self.saved, row])

    def undo(self) -> None:
        """Remove the person's last label; do nothing if there is none."""
        own = [n for n, row in enumerate(self.saved) if row.get("annotator") == self.annotator]
        if own:
            self._save(self.saved[: own[-1]] + self.saved[own[-1] + 1 :])

    def _save(self, rows: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with explained_writes(self.file):
            write_atomically(self.file, lines)
        self.saved = rows

    def _is_done(self, pair: Mapping[str, Any]) -> bool:
        return any(
            row.get("annotator") == self.annotator and _texts(row) == _texts(pair)
            for row in self.saved
        )

    def _sides(self, pair: Mapping[str, Any]) -> tuple[str, str]:
        """Return the left and the right answer; half of the pairs are shown in each order."""
        text = json.dumps([*_texts(pair), self.annotator])
        is_swapped = blake2b(text.encode(), digest_size=1).digest()[0] % 2
        return (pair["second"], pair["first"]) if is_swapped else (pair["first"], pair["second"])


def as_text(prompt: str | Messages) -> str:
    """Return a prompt as a person reads it."""
    if not is_messages(prompt):
        return str(prompt)
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _texts(row: Mapping[str, Any]) -> tuple[str, Any, Any]:
    return json.dumps(row.get("prompt")), row.get("first"), row.get("second")
