"""Check whether a reward model was trained on texts with the end-of-sequence token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from statsmodels.stats.weightstats import DescrStatsW

from pipeline.inputs.preference_pairs import LabelledPair
from pipeline.reward_validation.rates import hits
from pipeline.reward_validation.scores import encoded_scores
from ppo_core.data.prompts import context_length
from ppo_core.models.reward_model import RewardModel

MAX_PAIRS = 500
"""Maximum number of pairs that are scored both ways; enough for a few points of accuracy."""

CLEARLY_BETTER = 0.02
"""Minimum gain in accuracy of the other setting, by the lower end of its interval, for the present
setting to count as wrong."""


@dataclass(frozen=True, kw_only=True)
class EndOfText:
    """Scores with and without the end-of-sequence token after each response."""

    as_set: bool
    """Whether the setting adds the token."""

    difference: float
    """Mean absolute difference between the two scores of a response."""

    accuracy: float
    """Accuracy with the present setting."""

    other_accuracy: float
    """Accuracy on the same pairs with the other setting."""

    gain_low: float
    """Lower end of the 95 % interval of other_accuracy - accuracy (paired t)."""

    gain_high: float
    """Upper end of the same interval."""

    n: int
    """Pairs."""


def compare_ends(model: RewardModel, pairs: Sequence[LabelledPair]) -> EndOfText | None:
    """Score the first decided pairs with and without the token.

    Return None if there is no such token, or if fewer than two pairs fit: each text needs at least
    one token, and room for one more in the context.
    """
    if model.tokenizer.eos_token_id is None:
        return None
    other = RewardModel(
        model.model,
        model.tokenizer,
        bias=model.bias,
        gain=model.gain,
        end_of_text=not model.end_of_text,
    )
    decided = [pair for pair in pairs if not pair.tie][:MAX_PAIRS]
    encoded = [_encode(model, other, pair) for pair in decided]
    rows = [four for four in encoded if _readable(model, four)]
    if len(rows) < 2:
        return None
    scores = encoded_scores(model, [row for four in rows for row in four])
    (chosen, rejected), (other_chosen, other_rejected) = scores.reshape(-1, 2, 2).transpose(1, 2, 0)
    right, other_right = hits(chosen - rejected), hits(other_chosen - other_rejected)
    low, high = DescrStatsW(other_right - right).tconfint_mean()
    return EndOfText(
        as_set=model.end_of_text,
        difference=float(np.abs([chosen - other_chosen, rejected - other_rejected]).mean()),
        accuracy=float(right.mean()),
        other_accuracy=float(other_right.mean()),
        gain_low=float(low),
        gain_high=float(high),
        n=len(rows),
    )


def _encode(model: RewardModel, other: RewardModel, pair: LabelledPair) -> list[list[int]]:
    """Return the tokens of chosen and rejected, then of both with the other setting."""
    return [
        way.encode(pair.prompt, text)
        for way in (model, other)
        for text in (pair.chosen, pair.rejected)
    ]


def _readable(model: RewardModel, rows: Sequence[list[int]]) -> bool:
    context = context_length(model.model.config)
    lengths = list(map(len, rows))
    return min(lengths) > 0 and (context is None or max(lengths) <= context)
