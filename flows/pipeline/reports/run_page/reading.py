"""Sections with answers to read: judged pairs, and prompts with the answers of SFT and PPO."""

import random
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from pipeline.evaluation.comparison import POINTS
from pipeline.inputs.json_lines import read_jsonl
from pipeline.reports.document import Answer, PieceKind, Reading, Section
from pipeline.reports.evaluation import WHO
from pipeline.results.step_records import EvaluatedPolicy
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.reporting.escaping import printable

NUM_PROMPTS, NUM_PAIRS, PAIRS_OF_A_KIND = 8, 20, 5

MOST_CHARACTERS = 1500
"""Length to which a text is cut."""

OUTCOMES = {
    "first": "PPO won in both orders",
    "second": "PPO lost in both orders",
    "tie": "a tie, or the winner depends on the order",
}

PAIRS, PROMPTS = "Which answers won and lost? Pairs to read", "What did it learn to say? Prompts"
"""Titles of the sections."""

Row = Mapping[str, Any]


def pairs_section(evaluated: EvaluatedPolicy, contest: str) -> Section:
    """Return judged pairs: the best, worst and closest for PPO, and random pairs.

    Raises:
        DataError: the file of verdicts is missing or damaged.
    """
    rows = read_jsonl(evaluated.judgements)
    valid = [row for row in rows if row["contest"] == contest and row["outcome"] in OUTCOMES]
    if not valid:
        return Section(title=PAIRS, text=("The judge gave no valid verdict.",))
    chosen = choose_pairs(valid)
    has_probabilities = any("probability" in row["straight"] for row in valid)
    by = "the judge's probability" if has_probabilities else "the verdicts in both orders"
    return Section(
        title=PAIRS,
        text=(f"{len(chosen)} of {len(valid)} judged pairs, chosen by {by}.",),
        readings=tuple(_pair(kind, row, contest) for kind, row in chosen),
    )


def prompts_section(evaluated: EvaluatedPolicy) -> Section:
    """Return prompts with the answers of SFT and PPO, and marks where they differ.

    Raises:
        DataError: the file of answers is missing or damaged.
    """
    rows = read_jsonl(evaluated.samples)
    chosen = [rows[number] for number in _evenly(len(rows), NUM_PROMPTS)]
    text = (
        f"{len(chosen)} of {len(rows)} prompts, taken at equal distances. Words that only SFT "
        "says are struck through; words that only PPO says are underlined."
    )
    readings = (_prompt(number, row) for number, row in enumerate(chosen, 1))
    return Section(title=PROMPTS, text=(text,), readings=tuple(readings))


def choose_pairs(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Return pairs, each once: the best for the candidate, the worst, the closest, and random."""
    left = sorted(rows, key=strength, reverse=True)
    chosen: list[tuple[str, Row]] = []

    def take(kind: str, found: Sequence[Row], count: int = PAIRS_OF_A_KIND) -> None:
        for row in list(found[:count]):
            left.remove(row)
            chosen.append((kind, row))

    take("Best", [row for row in left if strength(row) > 0.5])
    take("Worst", [row for row in reversed(left) if strength(row) < 0.5])
    # Two equal answers tell a reader nothing.
    take("Closest", sorted(left, key=lambda row: (abs(strength(row) - 0.5), _is_equal(row))))
    take("Random", random.Random(0).sample(left, len(left)), NUM_PAIRS - len(chosen))
    return chosen


def _is_equal(row: Row) -> bool:
    return bool(row["candidate"].strip() == row["opponent"].strip())


def strength(row: Row) -> float:
    """Return how clearly the candidate won, from 0 to 1: the mean over both orders."""
    verdicts = row["straight"], row["swapped"]
    return sum(one.get("probability", POINTS[one["winner"]]) for one in verdicts) / 2


def differing_words(first: str, second: str) -> tuple[Answer, Answer]:
    """Return two answers in pieces, of SFT and PPO, with marks on the words that differ."""
    old, new = (re.findall(r"\S+\s*", text) for text in (first, second))
    # Without the spaces after the words, which do not count as differences.
    matcher = SequenceMatcher(None, first.split(), second.split(), autojunk=False)
    removed: list[tuple[PieceKind, str]] = []
    added: list[tuple[PieceKind, str]] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        same = kind == "equal"
        removed.append(("same" if same else "removed", "".join(old[a:b])))
        added.append(("same" if same else "added", "".join(new[c:d])))
    return (
        Answer(title=WHO["sft"], pieces=tuple(piece for piece in removed if piece[1])),
        Answer(title=WHO["ppo"], pieces=tuple(piece for piece in added if piece[1])),
    )


def shortened_text(text: str) -> str:
    """Return a text of a model for a page: printable, and cut with a note if it is long."""
    text = printable(text).strip()
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} [cut: {more:,} more characters]"


def _pair(kind: str, row: Row, contest: str) -> Reading:
    candidate, _, opponent = contest.partition("_vs_")
    names = {"first": WHO[candidate], "second": WHO[opponent], "tie": "a tie"}
    return Reading(
        title=f"{kind}: {OUTCOMES[row['outcome']]}",
        prompt=shortened_text(row["prompt"]),
        answers=(
            _plain(WHO[candidate], row["candidate"]),
            _plain(WHO[opponent], row["opponent"]),
        ),
        notes=(
            f"{WHO[candidate]} shown first. {_verdict(row['straight'], names)}",
            f"{WHO[opponent]} shown first. {_verdict(row['swapped'], names)}",
        ),
    )


def _verdict(verdict: Row, names: Mapping[str, str]) -> str:
    text = f"Verdict: {names[verdict['winner']]}"
    if "probability" in verdict:
        text += f"; probability that {names['first']} is better: {verdict['probability']:.2f}"
    return f"{text}. {shortened_text(verdict.get('reason', ''))}".strip()


def _prompt(number: int, row: Row) -> Reading:
    sft, ppo = shortened_text(row["sft"]), shortened_text(row["ppo"])
    others = [_plain(WHO[who], row[who]) for who in ("reference", "champion") if who in row]
    return Reading(
        title=f"Prompt {number}",
        prompt=shortened_text(shown_prompt(row["prompt"])),
        answers=(*differing_words(sft, ppo), *others),
        notes=("Both answers are equal.",) if sft == ppo else (),
    )


def _plain(title: str, text: str) -> Answer:
    return Answer(title=title, pieces=(("same", shortened_text(text)),))


def _evenly(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` numbers below `count`, at equal distances."""
    return sorted({number * count // wanted for number in range(wanted)}) if count else []
