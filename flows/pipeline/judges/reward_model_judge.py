"""A reward model as judge: the answer with the higher score is better."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite

from scipy.special import expit

from pipeline.inputs.model_digests import digest_of_model
from pipeline.judges.verdict import JudgedPrompt, Verdict
from pipeline.storage.workspace import original_names
from ppo_core.config.placement import placement_for_reading
from ppo_core.io.folder_cache import digest_of
from ppo_core.models.loading import load_reward_model

BATCH_SIZE = 64
"""Number of texts that are scored at a time."""

UNREADABLE = "A text has no token, or has more tokens than the context of the reward model."
"""Reason of a verdict on a text that the reward model cannot score."""


class RewardModelJudge:
    """Compares the scores that a sequence classifier with one label gives to two answers."""

    members: tuple[str, ...] = ()

    def __init__(self, path: str, *, end_of_text: bool) -> None:
        """Load the reward model of a folder or hub id.

        `end_of_text` is whether the model reads an end-of-sequence token after each answer.

        Raises:
            ModelError: the model does not exist, or does not give a single score.
        """
        self.name = original_names(f"reward-model:{path}")
        self.version = digest_of([digest_of_model(path), end_of_text])
        self._model = load_reward_model(
            path, end_of_text=end_of_text, placement=placement_for_reading()
        )
        self._scores: dict[tuple[str, str], float | None] = {}
        """Score of each prompt and answer; None if the model cannot read them."""

    def __call__(
        self, prompts: Sequence[JudgedPrompt], pairs: Sequence[tuple[str, str]]
    ) -> list[Verdict]:
        """Return one verdict per pair; P(first is better) = sigmoid(score_first - score_second).

        This is the Bradley-Terry model, with which reward models are trained (arXiv:2203.02155,
        eq. 1). A verdict is `invalid` if the model cannot read a text, or if a score is not finite.
        """
        texts = [
            (prompt, answer) for prompt, pair in zip(prompts, pairs, strict=True) for answer in pair
        ]
        keys = [(json.dumps(prompt), answer) for prompt, answer in texts]
        self._score(dict(zip(keys, texts, strict=True)))
        sides = [self._scores[key] for key in keys]
        return [verdict_by_score(*both) for both in zip(sides[::2], sides[1::2], strict=True)]

    def _score(self, texts: Mapping[tuple[str, str], tuple[JudgedPrompt, str]]) -> None:
        """Score the texts that have no score yet, by key.

        Equal texts get one score, because the last digits of a score depend on its batch. A judge
        is asked about each pair in both orders.
        """
        missing = texts.keys() - self._scores.keys()
        new = {key: self._model.encode(*text) for key, text in texts.items() if key in missing}
        self._scores |= dict.fromkeys(new)
        read = [key for key, row in new.items() if self._model.can_read(row)]
        if read:
            scores = self._model.score_encoded([new[key] for key in read], BATCH_SIZE).tolist()
            self._scores |= zip(read, scores, strict=True)


def verdict_by_score(first: float | None, second: float | None) -> Verdict:
    """Return the verdict for the higher score, or `invalid` if a score is None or not finite."""
    if first is None or second is None:
        return Verdict("invalid", reason=UNREADABLE)
    if not (isfinite(first) and isfinite(second)):
        return Verdict("invalid", reason=f"The scores are {first} and {second}.")
    probability = float(expit(first - second))
    if first == second:
        return Verdict("tie", probability)
    return Verdict("first" if first > second else "second", probability)
