"""Encode segments of token sequences, with many texts in one call of the tokenizer."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ppo_core.errors import DataError, library_errors


class Segment(NamedTuple):
    """A part of a sequence: text that is not encoded yet, or token ids."""

    content: str | list[int]
    """Text, or token ids."""

    counts: bool = True
    """Whether the tokens count in the loss of supervised fine-tuning."""

    has_start: bool = False
    """Whether the tokenizer's start tokens are added before a text."""


EncodedSegment = tuple[list[int], bool]
"""Token ids of a segment, and whether the tokens count in the loss."""


def encode_sequences(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Iterable[Segment]]
) -> list[list[EncodedSegment]]:
    """Return the segments of each sequence as token ids.

    Equal texts are encoded once, and many texts in one call, because a call of the tokenizer takes
    about as long as encoding a short text. A text gets the same token ids as when it is encoded
    alone.
    """
    texts: tuple[dict[str, None], dict[str, None]] = ({}, {})
    for sequence in sequences:
        for content, _, has_start in sequence:
            if isinstance(content, str):
                texts[has_start][content] = None
    known = (
        _encode(tokenizer, texts[False], with_start=False),
        _encode_started(tokenizer, texts[True]),
    )
    return [
        [
            (known[has_start][content] if isinstance(content, str) else content, counts)
            for content, counts, has_start in sequence
        ]
        for sequence in sequences
    ]


def encode_sequence(tokenizer: PreTrainedTokenizerBase, sequence: Iterable[Segment]) -> list[int]:
    """Return the token ids of one sequence."""
    [encoded] = encode_sequences(tokenizer, [list(sequence)])
    return joined(encoded)


def joined(sequence: Iterable[EncodedSegment]) -> list[int]:
    """Return the token ids of all segments of an encoded sequence as one list."""
    return [token for ids, _ in sequence for token in ids]


def _encode_started(
    tokenizer: PreTrainedTokenizerBase, texts: Collection[str]
) -> dict[str, list[int]]:
    """Encode texts with start tokens, but without an added end-of-sequence token.

    A text that a chat template has rendered may already begin with the start token, which is then
    not added again.
    """
    start, end = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    encoded = _encode(tokenizer, texts, with_start=True)
    ended = [text for text, ids in encoded.items() if ids[-1:] == end]
    for text, plain in _encode(tokenizer, ended, with_start=False).items():
        if plain[-1:] != end:
            encoded[text] = encoded[text][:-1]
    doubled = [text for text, ids in encoded.items() if ids[:2] == start * 2]
    return encoded | _encode(tokenizer, doubled, with_start=False)


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Collection[str], *, with_start: bool
) -> dict[str, list[int]]:
    # Some tokenizers fail for an empty list.
    if not texts:
        return {}
    failure = f"The tokenizer of '{tokenizer.name_or_path}' cannot encode a text"
    with library_errors(DataError, failure, "Use another tokenizer."):
        ids = tokenizer(list(texts), add_special_tokens=with_start)["input_ids"]
    return dict(zip(texts, ids, strict=True))
