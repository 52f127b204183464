"""Check whether a reward model was trained on texts with the end-of-sequence token."""

from collections.abc import Sequence

import numpy as np

from pipeline.evaluation.pair_accuracy import difference_interval, groups_of, hits
from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.results.reward_report import EndOfText
from pipeline.reward_validation.scores import TextScorer
from ppo_core.models.reward_model import RewardModel

MAX_PAIRS = 500
"""Maximum number of pairs that are scored with and without the end-of-sequence token."""

CLEARLY_BETTER = 0.02
"""The present setting counts as wrong if the 95 % interval of the other setting's gain in accuracy
lies above this value."""


def compare_ends(scorer: TextScorer, pairs: Sequence[LabeledPair]) -> EndOfText | None:
    """Score the first pairs that are not ties with and without the end-of-sequence token.

    Return None if the tokenizer has no such token, or if fewer than two pairs are usable. A pair is
    usable if all of its token rows, with and without the token, are non-empty and fit the context.
    """
    model = scorer.model
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
    encoded = [(pair, _encode(model, other, pair)) for pair in decided]
    usable = [(pair, rows) for pair, rows in encoded if all(map(model.can_read, rows))]
    if len(usable) < 2:
        return None
    scores = scorer.scores([row for _, rows in usable for row in rows])
    (chosen, rejected), (other_chosen, other_rejected) = scores.reshape(-1, 2, 2).transpose(1, 2, 0)
    right, other_right = hits(chosen - rejected), hits(other_chosen - other_rejected)
    groups = groups_of([pair for pair, _ in usable])
    low, high = difference_interval(other_right - right, groups)
    return EndOfText(
        as_set=model.end_of_text,
        difference=float(np.abs([chosen - other_chosen, rejected - other_rejected]).mean()),
        accuracy=float(right.mean()),
        other_accuracy=float(other_right.mean()),
        gain_low=low,
        gain_high=high,
        n=len(usable),
    )


def _encode(model: RewardModel, other: RewardModel, pair: LabeledPair) -> list[list[int]]:
    """Return the token rows of both responses as `model` encodes them, then as `other` does."""
    return [
        way.encode(pair.prompt, text)
        for way in (model, other)
        for text in (pair.chosen, pair.rejected)
    ]
