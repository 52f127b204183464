"""Score each tokenized text once, and raise an error for scores that are not finite."""

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.evaluation.pair_accuracy import Array
from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.reward_validation.vocabulary import known_tokens
from ppo_core.data.chat_template import Messages
from ppo_core.errors import ModelError
from ppo_core.io.progress_bar import BAR_DELAY, progress
from ppo_core.models.reward_model import RewardModel

BATCH_SIZE = 16
"""Number of texts per batch; small, so that a long validation often reports its progress."""


class TextScorer:
    """Scores texts with a reward model, each text once, in the precision in which PPO scores."""

    def __init__(self, model: RewardModel, *, bf16: bool = False) -> None:
        """Take the reward model; with `bf16`, the model computes in bfloat16 by autocast."""
        self.model = model
        self._bf16 = bf16
        self._known: dict[tuple[int, ...], float] = {}

    def of_members(self) -> list["TextScorer"]:
        """Return one scorer for each member of an ensemble; for a single model, this scorer."""
        members = self.model.members
        if len(members) == 1:
            return [self]
        return [TextScorer(one, bf16=self._bf16) for one in members]

    def scores(self, rows: Sequence[list[int]]) -> Array:
        """Return the scores (N,) of N token rows."""
        # The longest rows come first, so that a lack of memory is noticed early.
        new = sorted(
            {tuple(row) for row in rows} - self._known.keys(), key=lambda row: (-len(row), row)
        )
        with progress(len(new), "scoring", "text", delay=BAR_DELAY) as bar:
            for start in range(0, len(new), BATCH_SIZE):
                batch = new[start : start + BATCH_SIZE]
                with torch.autocast(self.model.model.device.type, torch.bfloat16, self._bf16):
                    found = self.model.score_encoded([list(row) for row in batch], BATCH_SIZE)
                self._known.update(zip(batch, found.double().tolist(), strict=True))
                bar.update(len(batch))
        return np.array([self._known[tuple(row)] for row in rows])

    def score_texts(self, prompts: Sequence[str | Messages], responses: Sequence[str]) -> Array:
        """Return the scores (N,) of one response to each of N prompts."""
        pairs = zip(prompts, responses, strict=True)
        return self.scores([self.model.encode(*texts) for texts in pairs])


def score_pairs(scorer: TextScorer, pairs: Sequence[LabeledPair]) -> tuple[Array, Array]:
    """Return the scores (N,) of the chosen and (N,) of the rejected responses.

    Raises:
        ModelError: the model has no embedding of a token, or a score is not finite.
    """
    model = scorer.model
    rows = [
        model.encode(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)
    ]
    _require_known_tokens(model, rows)
    chosen, rejected = scorer.scores(rows).reshape(-1, 2).T
    broken = np.flatnonzero(~(np.isfinite(chosen) & np.isfinite(rejected)))
    if broken.size:
        first = broken[0]
        raise ModelError(
            f"The reward model's scores of {broken.size} of {len(pairs)} labeled pairs are not "
            f"finite, so PPO would learn nothing from them. The first such pair is number "
            f"{first + 1}, with scores {chosen[first]} and {rejected[first]}: {pairs[first]}. "
            "Train the reward model again with a lower learning rate or in fp32."
        )
    return chosen, rejected


def require_finite(scores: Array, of: str) -> None:
    """Raise if a score is not finite; `of` names the scored texts.

    Raises:
        ModelError: a score is not finite.
    """
    if broken := np.count_nonzero(~np.isfinite(scores)):
        raise ModelError(
            f"The reward model's scores of {broken} of {scores.size} {of} are not finite. PPO "
            "would learn nothing from such scores. Train the reward model again with a lower "
            "learning rate or in fp32."
        )


def _require_known_tokens(model: RewardModel, rows: Sequence[list[int]]) -> None:
    """Raise a clear error if a token has no embedding, instead of the model's IndexError."""
    largest = max((max(row) for row in rows if row), default=0)
    known = known_tokens(model)
    if largest >= known:
        raise ModelError(
            f"The reward model's tokenizer gives id {largest} in the labeled pairs, but the model "
            f"has embeddings only for ids below {known}: it was trained with another tokenizer. "
            "Save that tokenizer in the folder of the reward model."
        )
