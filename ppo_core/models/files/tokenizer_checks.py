"""Check that a tokenizer does not expand short texts to huge ones or take exponential time.

`tokenizer.json` contains rules that the library `tokenizers` applies to each text. A rule may
replace a character by a million characters, and matching a pattern may take years. The library
cannot be interrupted, and ends the process if memory is full.
"""

import base64
import string
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppo_core.errors import ModelError
from ppo_core.errors.deadline import answer_within
from ppo_core.models.files.model_folder import objects_in, read_object

TOKENIZER = "tokenizer.json"

MAX_GROWTH = 1000
"""Largest number of characters into which all rules together may turn one character. Unicode
normalization gives at most 18."""

MAX_ADDED = 1000
"""Largest number of characters or tokens that one rule may add to each text."""

MAX_TOKEN_CHARACTERS = 10_000
"""Largest number of characters of a token. The longest tokens of published tokenizers
consist of a few hundred spaces."""

TRIAL_SECONDS = 10.0
"""Time limit for all trial texts; a good tokenizer takes milliseconds."""

CHARACTERS_AT_ONCE = 8

_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def check_tokenizer_file(file: Path) -> None:
    """Raise if the rules or tokens of a tokenizer.json could turn a short text into a huge one.

    Raises:
        ModelError: the file is not a JSON object, or is refused; the message names the rule.
    """
    content = read_object(file)
    growth = 1.0
    rules = objects_in([content.get(name) for name in _RULES])
    for rule in (one for one in rules if "type" in one):
        if _added(rule) > MAX_ADDED:
            raise _refused(
                file,
                f"its rule {rule['type']!r:.40} adds {_added(rule)} characters or tokens to a text",
            )
        growth *= _growth(rule)
    if growth > MAX_GROWTH:
        raise _refused(
            file,
            f"its rules may turn one character into {growth:.3g} characters, and at most "
            f"{MAX_GROWTH} are allowed",
        )
    longest = max(map(len, _tokens(content)), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise _refused(file, f"it has a token of {longest} characters")


def try_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Encode and decode texts of repeated characters, on which bad patterns take the longest.

    Raises:
        ModelError: the tokenizer takes longer than TRIAL_SECONDS.
        BaseException: the tokenizer fails, for example by a panic of its library.
    """
    # This entry silences transformers' warning that the trial texts exceed the model's context.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    ends = time.monotonic() + TRIAL_SECONDS
    for texts in _trial_texts():
        try:
            answer_within(ends - time.monotonic(), _encode_and_decode, tokenizer, texts)
        except TimeoutError:
            raise ModelError(
                f"The tokenizer of '{path}' takes more than {TRIAL_SECONDS:.0f} s for short texts "
                f"such as {texts[0]!r:.60}, so one of its patterns takes exponential time. Use "
                "another tokenizer."
            ) from None


def _trial_texts() -> Iterator[list[str]]:
    """Yield short lists of texts, because a list that takes too long cannot be interrupted."""
    yield [string.printable * 20, ""]
    for first in range(0, len(string.printable), CHARACTERS_AT_ONCE):
        yield [
            text
            for character in string.printable[first : first + CHARACTERS_AT_ONCE]
            for text in (
                *(character * 40 + end for end in ("", "\0", "-", "\n.")),
                (character * 20 + "-") * 20 + "\0",
            )
        ]


def _encode_and_decode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    # Encode a list: a call with one text would block all threads, also the one with the deadline.
    ids = tokenizer(texts, add_special_tokens=True)["input_ids"]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.decode_batch(ids)


def _growth(rule: Mapping[str, Any]) -> float:
    """Return the largest number of characters into which a rule turns one character."""
    if rule["type"] == "Replace":
        new = len(str(rule.get("content", "")))
        pattern = rule.get("pattern")
        old = pattern.get("String") if isinstance(pattern, Mapping) else None
        # A regular expression may match the empty string before a character and insert `content`.
        return max(1.0, new / len(old)) if isinstance(old, str) and old else 1.0 + new
    if rule["type"] == "Precompiled":
        return float(_longest_replacement(str(rule.get("precompiled_charsmap") or "")))
    return 1.0


def _longest_replacement(charsmap: str) -> int:
    """Return the length of the longest text in sentencepiece's table of replacements.

    The table begins with the size of an index, in 4 bytes, and the index itself. The texts follow,
    each with a zero byte at its end.
    """
    table = base64.b64decode(charsmap)
    begin = 4 + int.from_bytes(table[:4], "little")
    return max(map(len, table[begin:].split(b"\0")), default=1) or 1


def _added(rule: Mapping[str, Any]) -> int:
    """Return how many characters or tokens a rule adds to each text."""
    added = sum(
        len(text)
        for name in ("prepend", "suffix", "prefix", "word_delimiter_token", "pad_token")
        if isinstance(text := rule.get(name), str)
    )
    if rule["type"] == "TemplateProcessing":
        known = rule.get("special_tokens") or {}
        longest = max((len(token.get("ids") or []) for token in known.values()), default=0)
        added += longest * max(len(rule.get(name) or []) for name in ("single", "pair"))
    return added


def _tokens(content: Mapping[str, Any]) -> Iterator[str]:
    model = content.get("model") or {}
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        yield str(model.get(name) or "")
    for token in model.get("vocab") or ():
        # The vocabulary of Unigram is a list of tokens with their scores.
        yield str(token if isinstance(token, str) else token[0])
    for token in content.get("added_tokens") or ():
        yield str(token["content"])


def _refused(file: Path, reason: str) -> ModelError:
    return ModelError(f"'{file}' is refused: {reason}. Nothing was loaded. Use another tokenizer.")
