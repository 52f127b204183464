"""Check that the score of a text is finite and does not depend on its batch or padding."""

from collections.abc import Sequence

import numpy as np

from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.results.reward_report import Contract, Difference, EndOfText
from pipeline.reward_validation.end_of_text import CLEARLY_BETTER, compare_ends
from pipeline.reward_validation.odd_texts import RESPONSES, odd_rows
from pipeline.reward_validation.padding import (
    difference_between,
    score_alone,
    score_left_padded,
    score_right_padded,
    score_together,
)
from pipeline.reward_validation.scores import TextScorer
from pipeline.reward_validation.vocabulary import measure_vocabulary, vocabulary_reasons
from ppo_core.data.rows.dialogues import shown_prompt

NUM_PAIRS = 16
"""Number of pairs whose texts are scored alone, in a batch, and with padding."""


def check_contract(
    scorer: TextScorer, pairs: Sequence[LabeledPair], *, tolerance: float
) -> Contract:
    """Score real and unusual texts in all ways in which training or serving may score them.

    Args:
        scorer: scores texts with the reward model. The checks that compare several scores of one
            text call the model of the scorer directly, in fp32.
        pairs: at least one held-out pair; all scores must be finite. The end-of-sequence check uses
            up to 500 pairs, and all other checks use the first `NUM_PAIRS`.
        tolerance: maximum difference between two scores of the same text, as a fraction of the
            standard deviation of the real texts' scores.
    """
    model = scorer.model
    real = [(pair.prompt, text) for pair in pairs[:NUM_PAIRS] for text in _texts(pair)]
    rows = [model.encode(*texts) for texts in real]
    odd = odd_rows(model, pairs[0].prompt, pairs[0].chosen)
    odd_scores = dict(zip(odd, score_alone(model, list(odd.values())), strict=True))
    mixed = rows + [
        odd[name] for name in RESPONSES if name in odd and np.isfinite(odd_scores[name])
    ]
    alone = score_alone(model, mixed)
    together = score_together(model, mixed)
    left = score_left_padded(model, mixed)
    deviation = float(alone[: len(rows)].std(ddof=1))
    batch = difference_between(alone, together, deviation)
    right_padded = difference_between(together, score_right_padded(model, mixed), deviation)
    left_padded = None if left is None else difference_between(alone, left, deviation)
    differences = {"batch": batch, "right_filler": right_padded, "left_filler": left_padded}
    ends = compare_ends(scorer, pairs)
    vocabulary = measure_vocabulary(
        model, [part for prompt, text in real for part in (shown_prompt(prompt), text)]
    )
    return Contract(
        deviation=deviation,
        batch=batch,
        right_filler=right_padded,
        left_filler=left_padded,
        odd_scores={
            name: float(score) if np.isfinite(score) else None for name, score in odd_scores.items()
        },
        end_of_text=ends,
        vocabulary=vocabulary,
        reasons=[
            *_difference_reasons(differences, tolerance * deviation, tolerance),
            *_odd_reasons(odd_scores),
            *_end_reasons(ends),
            *vocabulary_reasons(vocabulary),
        ],
    )


def _texts(pair: LabeledPair) -> tuple[str, str]:
    return pair.chosen, pair.rejected


CONDITIONS = {
    "batch": (
        "alone and in a batch",
        "PPO's reward would depend on the batch size. Score in fp32",
    ),
    "right_filler": (
        "with and without padding after it",
        "PPO's reward would depend on the other texts of the batch. Fix the model's attention mask",
    ),
    "left_filler": (
        "with and without padding before it",
        "servers that pad on the left would give another reward. Fix the model's attention mask "
        "and positions",
    ),
}
"""By comparison: the two conditions under which a text is scored; then the consequence if the two
scores differ, and the remedy."""


def _difference_reasons(
    differences: dict[str, Difference | None], limit: float, tolerance: float
) -> list[str]:
    found = {
        name: "without bound"
        if difference.largest is None
        else f"by up to {difference.largest:.2g}"
        for name, difference in differences.items()
        if difference is not None and (difference.largest is None or difference.largest > limit)
    }
    reasons = []
    for name, size in found.items():
        condition, consequence = CONDITIONS[name]
        reasons.append(
            f"A text's scores {condition} differ {size}; the limit is {limit:.2g} "
            f"(tolerance={tolerance} times the standard deviation of the scores): "
            f"{consequence}, or raise tolerance."
        )
    return reasons


def _odd_reasons(odd_scores: dict[str, float]) -> list[str]:
    broken = [name for name, score in odd_scores.items() if not np.isfinite(score)]
    if not broken:
        return []
    return [
        f"Scores of these unusual texts are not finite: {', '.join(broken)}. PPO would stop as "
        "soon as the policy writes such a text. Load the reward model in fp32, or train it again."
    ]


def _end_reasons(ends: EndOfText | None) -> list[str]:
    if ends is None or ends.gain_low <= CLEARLY_BETTER:
        return []
    trained, setting = ("without", "false") if ends.as_set else ("with", "true")
    return [
        f"The accuracy on {ends.n} pairs is {ends.accuracy:.1%} with the current setting, and "
        f"{ends.other_accuracy:.1%} {trained} an end-of-sequence token after each response. The "
        f"95 % interval of the gain begins at {100 * ends.gain_low:.1f} points, above "
        f"{100 * CLEARLY_BETTER:.0f} points, so "
        f"the model was probably trained {trained} the token. "
        f"Set end_of_text = {setting} in [reward_model_training]."
    ]
