"""Make the sections with answers to read: judged pairs, prompts, and PPO's newest samples."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from pipeline.evaluation.compare_in_both_orders import POINTS
from pipeline.inputs.json_lines import read_records
from pipeline.judges.verdict import Verdict
from pipeline.reports.document import Answer, PieceKind, Pieces, Reading, Section
from pipeline.reports.evaluation_report import WHO
from pipeline.results.step_records import EvaluatedPolicy, WatchedPrompt
from pipeline.results.watched_prompts import SampleRow
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.errors import DataError
from ppo_core.errors.control_characters import remove_controls

NUM_PROMPTS, NUM_PAIRS, PAIRS_OF_A_KIND = 8, 20, 5

MOST_CHARACTERS = 1500
"""Maximum number of characters that the page shows of a text; the rest is cut."""

OUTCOMES = {
    "first": "PPO won in both orders",
    "second": "PPO lost in both orders",
    "tie": "a tie, or the winner depends on the order",
}

PAIRS, PROMPTS = "Which answers won and lost? Pairs to read", "What did it learn to say? Prompts"
"""Titles of the sections."""

WATCHED = "How did its answers change during PPO?"
"""Title of the section with answers to the same prompts at several times of the training."""

NEWEST_SAMPLES = "What does it say now? Newest samples"
"""Title of the section with samples, which the page has only while PPO trains."""

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class JudgedPair:
    """A row of the file of verdicts."""

    contest: str
    prompt: str
    candidate: str
    opponent: str
    outcome: str

    straight: Verdict
    """Verdict with the candidate shown first. In both verdicts, `first` means the candidate."""

    swapped: Verdict

    @property
    def strength(self) -> float:
        """How clearly the candidate won, from 0 to 1.

        Mean over both orders of the probability that the candidate is better, or of its points if
        the judge gives no probability.
        """
        found = (
            POINTS[one.winner] if one.probability is None else one.probability
            for one in (self.straight, self.swapped)
        )
        return sum(found) / 2

    @property
    def is_equal(self) -> bool:
        """Whether both answers are equal."""
        return self.candidate.strip() == self.opponent.strip()


@dataclass(frozen=True, kw_only=True)
class AnsweredPrompt:
    """A row of the file of answers."""

    prompt: str | list[Any]
    sft: str
    ppo: str
    reference: str | None = None
    champion: str | None = None


def pairs_section(evaluated: EvaluatedPolicy, contest: str) -> Section:
    """Return judged pairs: the best, worst and closest for PPO, and random pairs.

    Raises:
        DataError: the file of verdicts is missing or damaged.
    """
    rows = read_evaluation_rows(evaluated.judgements, JudgedPair)
    valid = [row for row in rows if row.contest == contest and row.outcome in OUTCOMES]
    if not valid:
        return Section(title=PAIRS, text=("The judge gave no valid verdict.",))
    chosen = choose_pairs(valid)
    has_probabilities = any(row.straight.probability is not None for row in valid)
    by = "the judge's probability" if has_probabilities else "the verdicts in both orders"
    return Section(
        title=PAIRS,
        text=(f"{len(chosen)} of {len(valid)} judged pairs, chosen by {by}.",),
        readings=tuple(_pair(kind, row) for kind, row in chosen),
    )


def prompts_section(evaluated: EvaluatedPolicy) -> Section:
    """Return prompts with the answers of SFT and PPO, in which the differing words are marked.

    Raises:
        DataError: the file of answers is missing or damaged.
    """
    rows = read_evaluation_rows(evaluated.samples, AnsweredPrompt)
    chosen = [rows[number] for number in _evenly(len(rows), NUM_PROMPTS)]
    text = (
        f"{len(chosen)} of {len(rows)} prompts, taken at equal distances. Words that only SFT "
        "says are struck through; words that only PPO says are underlined."
    )
    readings = (_prompt(number, row) for number, row in enumerate(chosen, 1))
    return Section(title=PROMPTS, text=(text,), readings=tuple(readings))


def newest_section(path: Path) -> Section:
    """Return responses of the last update of PPO, from a file that `write_completions` wrote.

    Raises:
        DataError: the file is damaged.
    """
    readings = tuple(
        Reading(
            title=f"Sample {number}",
            prompt=shortened_text(row.query),
            answers=(_plain("PPO", row.response),),
            notes=(f"Score: {row.score:z.4g}",),
        )
        for number, row in enumerate(read_records(path, SampleRow), 1)
    )
    return Section(title=NEWEST_SAMPLES, text=("Sampled in the last update.",), readings=readings)


def watched_section(watched: Sequence[WatchedPrompt]) -> Section:
    """Return prompts with their answers during PPO; words that SFT did not say are marked."""
    text = (
        "Greedy answers to training prompts, taken at equal distances. The page underlines words "
        "that the first answer does not have at the same place."
    )
    return Section(
        title=WATCHED,
        text=(text,),
        readings=tuple(_watched(number, one) for number, one in enumerate(watched, 1)),
    )


def choose_pairs(rows: Sequence[JudgedPair]) -> list[tuple[str, JudgedPair]]:
    """Return the best, worst and closest pairs for the candidate, and random pairs, each once."""
    left = sorted(rows, key=lambda row: row.strength, reverse=True)
    chosen: list[tuple[str, JudgedPair]] = []

    def take(kind: str, found: Sequence[JudgedPair], count: int = PAIRS_OF_A_KIND) -> None:
        for row in list(found[:count]):
            left.remove(row)
            chosen.append((kind, row))

    take("Best", [row for row in left if row.strength > 0.5])
    take("Worst", [row for row in reversed(left) if row.strength < 0.5])
    # Among equally close pairs, equal answers come last, because they tell a reader nothing.
    take("Closest", sorted(left, key=lambda row: (abs(row.strength - 0.5), row.is_equal)))
    take("Random", random.Random(0).sample(left, len(left)), NUM_PAIRS - len(chosen))
    return chosen


def differing_words(first: str, second: str) -> tuple[Pieces, Pieces]:
    """Return two answers in pieces, in which the differing words are marked."""
    old, new = (re.findall(r"\S+\s*", text) for text in (first, second))
    # Words are compared without the spaces after them: spaces do not count as differences.
    matcher = SequenceMatcher(None, first.split(), second.split(), autojunk=False)
    removed: list[tuple[PieceKind, str]] = []
    added: list[tuple[PieceKind, str]] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        same = kind == "equal"
        removed.append(("same" if same else "removed", "".join(old[a:b])))
        added.append(("same" if same else "added", "".join(new[c:d])))
    return tuple(filter(itemgetter(1), removed)), tuple(filter(itemgetter(1), added))


def shortened_text(text: str) -> str:
    """Return a text of a model in printable form; a long text is cut, and a note says so."""
    text = remove_controls(text).strip()
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} [cut: {more:,} more characters]"


def read_evaluation_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of a file of an evaluation.

    Raises:
        DataError: the file is missing, damaged or empty.
    """
    rows = read_records(path, kind)
    if not rows:
        raise DataError(f"'{path}' has no rows.")
    return rows


def _pair(kind: str, row: JudgedPair) -> Reading:
    candidate, _, opponent = row.contest.partition("_vs_")
    names = {"first": WHO[candidate], "second": WHO[opponent], "tie": "a tie"}
    return Reading(
        title=f"{kind}: {OUTCOMES[row.outcome]}",
        prompt=shortened_text(row.prompt),
        answers=(_plain(WHO[candidate], row.candidate), _plain(WHO[opponent], row.opponent)),
        notes=(
            f"{WHO[candidate]} shown first. {_verdict(row.straight, names)}",
            f"{WHO[opponent]} shown first. {_verdict(row.swapped, names)}",
        ),
    )


def _verdict(verdict: Verdict, names: Mapping[str, str]) -> str:
    text = f"Verdict: {names[verdict.winner]}"
    if verdict.probability is not None:
        text += f"; probability that {names['first']} is better: {verdict.probability:.2f}"
    return f"{text}. {shortened_text(verdict.reason)}".strip()


def _prompt(number: int, row: AnsweredPrompt) -> Reading:
    sft, ppo = shortened_text(row.sft), shortened_text(row.ppo)
    others = {"reference": row.reference, "champion": row.champion}
    return Reading(
        title=f"Prompt {number}",
        prompt=shortened_text(shown_prompt(row.prompt)),
        answers=(
            *(
                Answer(title=WHO[who], pieces=pieces)
                for who, pieces in zip(("sft", "ppo"), differing_words(sft, ppo), strict=True)
            ),
            *(_plain(WHO[who], text) for who, text in others.items() if text is not None),
        ),
        notes=("Both answers are equal.",) if sft == ppo else (),
    )


def _watched(number: int, watched: WatchedPrompt) -> Reading:
    """Return a prompt with its answers, in which equal successive answers are shown once."""
    shown = {update: (text, f"{score:z.4g}") for update, (text, score) in watched.answers.items()}
    first = shortened_text(next(iter(shown.values()))[0])
    return Reading(
        title=f"Training prompt {number}",
        prompt=shortened_text(watched.prompt),
        answers=tuple(
            Answer(
                title=f"{_times([update for update, _ in equal])}: score {score}",
                pieces=differing_words(first, shortened_text(text))[1],
            )
            for (text, score), equal in groupby(shown.items(), key=itemgetter(1))
        ),
    )


def _times(updates: Sequence[int]) -> str:
    after = [str(update) for update in updates if update]
    if not after:
        return "Before PPO"
    listed = f"update{'s' * (len(after) > 1)} {', '.join(after)}"
    return f"Before PPO, after {listed}" if 0 in updates else f"After {listed}"


def _plain(title: str, text: str) -> Answer:
    return Answer(title=title, pieces=(("same", shortened_text(text)),))


def _evenly(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` indices below `count`, at equal distances."""
    return sorted({number * count // wanted for number in range(wanted)}) if count else []
