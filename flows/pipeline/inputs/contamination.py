"""Leave out evaluation prompts that are copies of training texts, even with changed words.

Texts are compared as sequences of words, without case, punctuation, Unicode variants and system
messages. A prompt of at least LEAST_WORDS words is a copy of a training text if both have the same
sequence of letters and digits. A prompt of at least LEAST_CHANGED words is also a copy if one
training text has at least LEAST_SHARED of the prompt's n-grams (N words in sequence), and more than
the fraction `max_overlap` of the prompt's n-grams. An n-gram in more than TEMPLATE different texts
is part of a template, and is not counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute as pc
from pandas.util import hash_array

from ppo_core.data.chat_template import Messages, is_messages
from ppo_core.data.rows.dialogues import is_answered
from ppo_core.data.rows.read_rows import ROW, Rows, derive, each
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.rows.row_error import RowError
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE
from ppo_core.errors import DataError
from ppo_core.io.folder_cache import digest_of_code

N = 3
"""Number of words of an n-gram. With one word in ten replaced, 73 % of the 3-grams are unchanged,
but only 25 % of the 13-grams."""

TEMPLATE = 10
"""An n-gram that is in more different texts than this number is part of a template."""

LEAST_WORDS = 8
"""Fewest words of a prompt that counts as a copy; shorter prompts may be equal by chance."""

LEAST_CHANGED = 13
"""Smallest number of words of a prompt that counts as a copy with changed words. Shorter sentences
often differ only in one word by chance, such as a name in "Tom and Lily are brother and sister"."""

LEAST_SHARED = 8
"""Smallest number of n-grams that a copy with changed words shares with a training text."""

COPIED = "whose text is also in the training data"
"""Reason for which a prompt is left out; the message adds the number of prompts."""

COLUMNS = ("prompt", "completion", "text", "messages", "chosen", "rejected", "first", "second")
"""Columns whose texts train a model."""

_PER_WORD = np.uint64(0x9E3779B97F4A7C15)
"""Odd number that makes the hash of an n-gram depend on the order of its words."""

_HITS_AT_ONCE = 1_000_000
"""Number of found n-grams after which template n-grams are dropped, to bound the memory."""

_APOSTROPHES = "['`\u00b4\u02bc\u2018\u2019]"
_WITHOUT_SPACES = r"([\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}])"
"""Characters of scripts that write no spaces; each counts as a word."""
_NO_WORD = r"[^\pL\pM\pN]+"

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def without_copies(rows: Rows, training: Sequence[Rows], max_overlap: float) -> Rows:
    """Return the rows of an evaluation whose prompts are not copies of training texts.

    The rows that are left out are counted and listed, but `max_left_out` does not limit them.

    Args:
        rows: rows with `prompt`.
        training: data sets that train a model.
        max_overlap: largest fraction of a prompt's n-grams that may be in one training text; with
            1, no row is left out.

    Raises:
        DataError: no row is left.
    """
    if max_overlap == 1:
        return rows

    @cache
    def copies() -> set[int]:
        found = find_copies(rows.column("prompt"), _texts_of(training), max_overlap)
        numbers = rows.column(ROW)
        return {numbers[place] for place in found}

    def convert(row: Row) -> Row:
        if row[ROW] in copies():
            raise RowError(COPIED)
        return {name: value for name, value in row.items() if name != ROW}

    inputs = {
        "training": [one.key for one in training],
        "max_overlap": max_overlap,
        "code": digest_of_code(__name__),
    }
    kept = derive(replace(rows, max_left_out=1.0), "unseen-prompts", inputs, each(convert))
    if not len(kept):
        raise DataError(
            f"{rows.source}: the text of all {len(rows)} prompts is also in the training data "
            f"({', '.join(one.source for one in training)}), so no win rate on unseen prompts can "
            "be measured. Name other eval_prompts, or set max_overlap=1 to use them anyway."
        )
    return replace(kept, max_left_out=rows.max_left_out)


def find_copies(
    prompts: Sequence[str | Messages], training: Iterable[Sequence[str]], max_overlap: float
) -> list[int]:
    """Return the positions of the prompts that are copies of training texts.

    Args:
        prompts: the prompts of the evaluation.
        training: the training texts in batches.
        max_overlap: see `without_copies`.
    """
    evaluated = _Words.of([text_of(prompt) for prompt in prompts])
    found = _Found(evaluated)
    for batch in training:
        found.look_in(_Words.of(batch))
    shared, total = found.overlaps()
    is_changed = (shared >= LEAST_SHARED) & (shared > max_overlap * total)
    is_copy = found.is_equal() & (evaluated.counts >= LEAST_WORDS)
    is_copy |= is_changed & (evaluated.counts >= LEAST_CHANGED)
    return [int(place) for place in np.flatnonzero(is_copy)]


def text_of(value: str | Messages | None) -> str:
    """Return the text of a prompt or conversation.

    System messages are left out, because many prompts have the same system message. If all messages
    are system messages, all are kept.
    """
    if not is_messages(value):
        return value if isinstance(value, str) else ""
    turns = [turn for turn in value if turn["role"] != "system"] or value
    return "\n".join(turn["content"] or "" for turn in turns)


def _texts_of(training: Sequence[Rows]) -> Iterator[list[str]]:
    for rows in training:
        names = [name for name in COLUMNS if name in rows.table.column_names]
        for batch in rows.table.select_columns(names).with_format("arrow").iter(ROWS_AT_ONCE):
            for name in names:
                yield [text for value in batch[name].to_pylist() for text in texts_in(value)]


def texts_in(value: str | Messages | None) -> Iterable[str]:
    """Return the texts that are compared with prompts.

    Of a conversation, these are its messages, and the messages before the first and the last
    answer. All beginnings would repeat the first n-grams until they count as a template.
    """
    if not is_messages(value):
        return [text_of(value)]
    ends = [place for place, turn in enumerate(value) if place and is_answered([turn])]
    if not is_answered(value):
        ends.append(len(value))
    parts = [value[:end] for end in (ends[:1] + ends[-1:])]
    parts += [[turn] for turn in value if turn["role"] != "system"]
    return dict.fromkeys(map(text_of, parts))


@dataclass(frozen=True)
class _Words:
    """The words of D texts, as hashes."""

    hashes: Hashes
    """Hash of each word; the words of all texts are concatenated."""

    counts: Numbers
    """(D,) number of words of each text."""

    keys: Hashes
    """(D,) hash of the letters and digits of each text, so that "tl;dr" is equal to "tldr"."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> "_Words":
        plain = pc.utf8_lower(pc.utf8_normalize(pyarrow.array(texts, pyarrow.string()), "NFKC"))
        plain = pc.replace_substring_regex(plain, _APOSTROPHES, "")
        plain = _space_words(plain)
        plain = pc.utf8_trim_whitespace(pc.replace_substring_regex(plain, _NO_WORD, " "))
        words = pc.split_pattern(plain, " ")
        # An empty text is split into one empty word.
        counts = np.where(pc.equal(plain, ""), 0, pc.list_value_length(words)).astype(np.int64)
        flat = words.flatten()
        coded = flat.filter(pc.not_equal(flat, "")).dictionary_encode()
        of_each = _hashes(coded.dictionary)
        letters = pc.replace_substring(plain, " ", "")
        return cls(of_each[coded.indices.to_numpy()], counts, _hashes(letters))

    def ngrams(self) -> tuple[Hashes, Numbers]:
        """Return the hash of each n-gram, and the position of its text."""
        places = np.arange(max(len(self.hashes) - N + 1, 0))
        made = np.zeros(len(places), np.uint64)
        for word in range(N):
            made = (made + self.hashes[word : word + len(places)]) * _PER_WORD
        texts = np.repeat(np.arange(len(self.counts)), self.counts)[: len(places)]
        is_whole = places + N <= np.cumsum(self.counts)[texts]
        return made[is_whole], texts[is_whole]


def _hashes(texts: pyarrow.Array) -> Hashes:
    return hash_array(texts.to_numpy(zero_copy_only=False).astype(object), categorize=False)


@dataclass
class _Found:
    """The n-grams of evaluation prompts that were found in training texts."""

    evaluated: _Words
    """The words of the prompts."""

    grams: Hashes = field(init=False)
    """The different n-grams of the prompts, in ascending order."""

    def __post_init__(self) -> None:
        made, texts = self.evaluated.ngrams()
        self.grams, number = np.unique(made, return_inverse=True)
        (self._number, self._prompt), _ = _different(number, texts)
        # Equal prompts count as one text.
        self._asked = self._count(_different(number, self.evaluated.keys[texts])[0][0])
        self._hits, self._keys = np.zeros(0, np.int64), np.zeros(0, np.uint64)
        self._pending: list[tuple[Numbers, Hashes]] = []
        self._is_template = np.zeros(len(self.grams), bool)
        self._equal: set[int] = set()

    def look_in(self, batch: _Words) -> None:
        """Record which n-grams of the prompts are in the texts, and which texts equal a prompt."""
        self._equal.update(np.intersect1d(batch.keys, self.evaluated.keys).tolist())
        made, texts = batch.ngrams()
        if not len(made) or not len(self.grams):
            return
        number = np.searchsorted(self.grams, made).clip(max=len(self.grams) - 1)
        is_hit = (self.grams[number] == made) & ~self._is_template[number]
        self._pending.append((number[is_hit], batch.keys[texts[is_hit]]))
        if sum(len(hits) for hits, _ in self._pending) >= _HITS_AT_ONCE:
            self._drop_templates()

    def is_equal(self) -> npt.NDArray[np.bool_]:
        """Return which prompts are equal to a training text."""
        return np.isin(self.evaluated.keys, np.array([*self._equal], np.uint64))

    def overlaps(self) -> tuple[Numbers, Numbers]:
        """Return two numbers for each prompt; n-grams of templates are not counted.

        The first is the largest number of n-grams that the prompt shares with one training text.
        The second is the number of n-grams of the prompt.
        """
        self._drop_templates()
        counted = ~self._is_template[self._number]
        prompts = len(self.evaluated.counts)
        total = np.bincount(self._prompt[counted], minlength=prompts)
        shared = np.zeros(prompts, np.int64)
        # The pairs of n-gram and prompt are sorted by n-gram.
        begin, end = (np.searchsorted(self._number, self._hits, side) for side in ("left", "right"))
        of_prompt = end - begin
        first = np.repeat(np.cumsum(of_prompt) - of_prompt, of_prompt)
        place = np.repeat(begin, of_prompt) + np.arange(of_prompt.sum()) - first
        (prompt, _), count = _different(self._prompt[place], np.repeat(self._keys, of_prompt))
        np.maximum.at(shared, prompt, count)
        return shared, total

    def _drop_templates(self) -> None:
        """Join the new hits with the earlier hits, and drop the hits of n-grams of templates."""
        hits, keys = (
            np.concatenate(parts)
            for parts in zip((self._hits, self._keys), *self._pending, strict=True)
        )
        self._pending = []
        (hits, keys), _ = _different(hits, keys)
        self._is_template |= self._asked + self._count(hits) > TEMPLATE
        is_kept = ~self._is_template[hits]
        self._hits, self._keys = hits[is_kept], keys[is_kept]

    def _count(self, numbers: Numbers) -> Numbers:
        return np.bincount(numbers, minlength=len(self.grams))


def _different(first: Numbers, second: Any) -> tuple[tuple[Numbers, Any], Numbers]:
    """Return the different pairs of two arrays in ascending order, and how often each occurs."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    is_new = np.ones(len(first), bool)
    is_new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    places = np.flatnonzero(is_new)
    return (first[places], second[places]), np.diff(places, append=len(first))


def _space_words(texts: pyarrow.Array) -> pyarrow.Array:
    """Return texts (B,) with spaces around each character of a script that writes no spaces."""
    return pc.replace_substring_regex(texts, _WITHOUT_SPACES, r" \1 ")


def split_words(texts: Sequence[str]) -> list[list[str]]:
    """Return the words of each text; in a script without spaces, each character is a word."""
    spaced = _space_words(pyarrow.array(texts, pyarrow.string()))
    return [text.split() for text in spaced.to_pylist()]
