"""Score token rows and pairs, and raise for scores that are not finite."""

from collections.abc import Sequence

import numpy as np

from pipeline.inputs.preference_pairs import LabelledPair
from pipeline.reward_validation.rates import Array
from pipeline.reward_validation.vocabulary import known_tokens
from ppo_core.errors import ModelError
from ppo_core.models.reward_model import RewardModel

BATCH_SIZE = 64
"""Number of texts per batch."""


def encoded_scores(
    model: RewardModel, rows: Sequence[list[int]], batch_size: int = BATCH_SIZE
) -> Array:
    """Return the scores (N,) of N token rows."""
    scores: Array = model.score_encoded(rows, batch_size).double().numpy()
    return scores


def score_pairs(model: RewardModel, pairs: Sequence[LabelledPair]) -> tuple[Array, Array]:
    """Return the scores (N,) of the chosen and (N,) of the rejected responses.

    Raises:
        ModelError: the model has no embedding of a token, or a score is not finite.
    """
    rows = [
        model.encode(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)
    ]
    _require_known_tokens(model, rows)
    chosen, rejected = encoded_scores(model, rows).reshape(-1, 2).T
    broken = np.flatnonzero(~(np.isfinite(chosen) & np.isfinite(rejected)))
    if broken.size:
        first = broken[0]
        raise ModelError(
            f"The reward model's scores of {broken.size} of {len(pairs)} held-out pairs are not "
            f"finite, so PPO would learn nothing from them. The first such pair is pair {first}, "
            f"with scores {chosen[first]} and {rejected[first]}: {pairs[first]}. Train the reward "
            "model again with a lower learning rate or in fp32."
        )
    return chosen, rejected


def require_finite(scores: Array, of: str) -> None:
    """Raise if a score in (M,) or (M, K) for M prompts is not finite; `of` names the scored texts.

    Raises:
        ModelError: a score is not finite.
    """
    broken = np.argwhere(~np.isfinite(scores))
    if len(broken):
        raise ModelError(
            f"The reward model's scores of {len(broken)} {of} are not finite, first for prompt "
            f"{broken[0][0]}. PPO would learn nothing from such scores. Train the reward model "
            "again with a lower learning rate or in fp32."
        )


def _require_known_tokens(model: RewardModel, rows: Sequence[list[int]]) -> None:
    """Raise if a token has no embedding, because the model would raise an unclear IndexError."""
    largest = max((max(row) for row in rows if row), default=0)
    known = known_tokens(model)
    if largest >= known:
        raise ModelError(
            f"The reward model's tokenizer gives id {largest} in the held-out pairs, but the model "
            f"has embeddings only for ids below {known}: it was trained with another tokenizer. "
            "Save that tokenizer in the folder of the reward model."
        )
