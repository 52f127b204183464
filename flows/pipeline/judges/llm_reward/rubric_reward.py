"""A reward of PPO for which a language model scores each response by a rubric."""

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from pipeline.judges.chat_model import ChatModel, Question
from pipeline.judges.llm_reward.score_question import Score, pose_score, read_score, score_wording
from pipeline.judges.reply_cache import Case, ReplyCache, ask_until_read
from ppo_core.config.reward_names import NamedReward
from ppo_core.errors import JudgeError

LAST_ANSWERS = 256
"""Number of latest answers of a process to which the limit of invalid answers applies."""

LEAST_ANSWERS = 64
"""Minimum number of answers for this limit; with fewer answers, the fraction is uncertain."""


class RubricReward:
    """Scores responses from 1 to 10 by a rubric; it is a reward function of PPO.

    If the model's answer about a response is invalid, the response gets the mean of the valid
    scores of the same call. If this call has no valid score, the response gets the mean of the last
    valid scores.
    """

    def __init__(
        self,
        reward: NamedReward,
        chat: ChatModel,
        cache: ReplyCache,
        rubric: str,
        *,
        attempts: int,
        max_invalid: float,
    ) -> None:
        """Take the entry of `rewards`, its chat model, and the rubric.

        `attempts` is the maximum number of times to ask a question whose reply has no score.
        `max_invalid` is the largest fraction of invalid answers.
        """
        self._reward, self._chat, self._cache, self._rubric = reward, chat, cache, rubric
        self._attempts, self._max_invalid = attempts, max_invalid
        self._wording = score_wording(rubric)
        self._last: deque[float | None] = deque(maxlen=LAST_ANSWERS)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Return one score for each response.

        Raises:
            JudgeError: the model cannot be asked, the budget is spent, or too many answers are
                invalid. All replies are stored.
        """
        scores = self.scores(prompts, responses)
        values = [score.value for score in scores]
        self._last.extend(values)
        if None not in values:
            return [value for value in values if value is not None]
        known = [value for value in self._last if value is not None]
        number, invalid = len(self._last), len(self._last) - len(known)
        if not known or (number >= LEAST_ANSWERS and invalid > self._max_invalid * number):
            reason = next(score.reason for score in scores if score.value is None)
            raise JudgeError(
                f"rewards={self._reward.spec!r}: {invalid} of the last {number} answers have no "
                f"score from 1 to 10, more than evaluation.max_invalid={self._max_invalid:g} "
                f"allows, so the reward would be noise. The last reason: {reason}\nAsk for one "
                "number in the rubric, name a model that can follow it, or raise max_invalid. The "
                "last checkpoint is kept."
            )
        mean = fmean([value for value in values if value is not None] or known)
        return [mean if value is None else value for value in values]

    def scores(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Score]:
        """Return one score for each response, without a value if the answer is invalid.

        Raises:
            JudgeError: the model cannot be asked, or the budget is spent.
        """
        cases = [(*texts, "") for texts in zip(prompts, responses, strict=True)]
        try:
            found = ask_until_read(
                self._chat,
                self._cache,
                cases,
                wording=self._wording,
                attempts=self._attempts,
                pose=self._pose,
                read=read_score,
                is_invalid=lambda score: score.value is None,
            )
        except JudgeError as error:
            # Raise JudgeError itself, because the parent process does not know its subclasses.
            raise JudgeError(f"rewards={self._reward.spec!r}: {error}") from error
        return [found[case] for case in cases]

    def _pose(self, case: Case, attempt: int) -> Question:
        return pose_score(self._rubric, case[0], case[1], attempt=attempt)
