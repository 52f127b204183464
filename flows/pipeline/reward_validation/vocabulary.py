"""Check that a tokenizer is the one that a reward model was trained with."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from ppo_core.models.reward_model import RewardModel

MAX_UNKNOWN = 0.05
"""Maximum share of unknown tokens in real texts."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer compared with its model."""

    largest_id: int
    """Largest token id of a text; the pad token, which scripts add, does not count."""

    embeddings: int
    """Token embeddings of the model; ids must be below this number."""

    unknown: float | None
    """Share of unknown tokens in real texts; None if the tokenizer has no unknown token."""

    digest: str
    """SHA-256 of the tokens with their ids, and of the special tokens."""

    chat_template: str | None
    """SHA-256 of the chat template; None without one."""


def measure_vocabulary(model: RewardModel, texts: Sequence[str]) -> Vocabulary:
    """Compare a tokenizer with its model and with real texts."""
    tokenizer = model.tokenizer
    tokens = tokenizer.get_vocab()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    template = tokenizer.chat_template
    return Vocabulary(
        largest_id=max(number for token, number in tokens.items() if token != tokenizer.pad_token),
        embeddings=known_tokens(model),
        unknown=_unknown_share(model, texts),
        digest=_digest([sorted(tokens.items()), sorted(special.items())]),
        chat_template=None if template is None else _digest(template),
    )


def known_tokens(model: RewardModel) -> int:
    """Return the number of token embeddings of a model."""
    return cast("nn.Embedding", model.model.get_input_embeddings()).num_embeddings


def vocabulary_reasons(vocabulary: Vocabulary) -> list[str]:
    """Return the reasons against a model with this tokenizer."""
    reasons = []
    if vocabulary.largest_id >= vocabulary.embeddings:
        reasons.append(
            f"Its tokenizer gives ids up to {vocabulary.largest_id}, and the model knows those "
            f"below {vocabulary.embeddings}: a text with a larger one cannot be scored. Save the "
            "tokenizer that it was trained with beside it, or resize its embeddings."
        )
    if vocabulary.unknown is not None and vocabulary.unknown > MAX_UNKNOWN:
        reasons.append(
            f"{vocabulary.unknown:.1%} of the tokens of real texts are unknown to its tokenizer, "
            f"more than {MAX_UNKNOWN:.0%}: it was trained with another one, or on another "
            "language, and would not see what PPO changes. Save the right tokenizer beside it."
        )
    return reasons


def _unknown_share(model: RewardModel, texts: Sequence[str]) -> float | None:
    unknown = model.tokenizer.unk_token_id
    # Without special tokens: the end-of-sequence token of GPT-2 is also its unknown token.
    ids = [
        token
        for text in texts
        for token in model.tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    if unknown is None or not ids:
        return None
    return ids.count(unknown) / len(ids)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
