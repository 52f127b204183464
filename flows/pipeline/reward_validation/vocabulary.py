"""Check that a reward model was trained with its tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from typing import cast

from torch import nn

from pipeline.results.reward_report import Vocabulary
from ppo_core.models.reward_model import RewardModel

MAX_UNKNOWN = 0.05
"""Maximum fraction of unknown tokens in real texts."""


def measure_vocabulary(model: RewardModel, texts: Sequence[str]) -> Vocabulary:
    """Compare the tokenizer of a model with the model's embeddings and with real texts."""
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
    """Return the reasons why a model and its tokenizer do not match; empty if they match."""
    reasons = []
    if vocabulary.largest_id >= vocabulary.embeddings:
        reasons.append(
            f"Its tokenizer has ids up to {vocabulary.largest_id}, but the model has embeddings "
            f"only for ids below {vocabulary.embeddings}, so some texts cannot be scored. Save the "
            "tokenizer of its training in the model's folder, or resize the embeddings."
        )
    if vocabulary.unknown is not None and vocabulary.unknown > MAX_UNKNOWN:
        reasons.append(
            f"{vocabulary.unknown:.1%} of the tokens of real texts are unknown to its tokenizer, "
            f"more than {MAX_UNKNOWN:.0%}. The model was trained with another tokenizer or in "
            "another language, and cannot tell such texts apart. Save the tokenizer of its "
            "training in the model's folder."
        )
    return reasons


def _unknown_share(model: RewardModel, texts: Sequence[str]) -> float | None:
    unknown = model.tokenizer.unk_token_id
    # Add no special tokens, because GPT-2's end-of-sequence token is also its unknown token.
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
