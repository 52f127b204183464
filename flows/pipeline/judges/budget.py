"""The limits on the cost of a paid judge."""

from ppo_core.errors import JudgeError


class Budget:
    """Counts the calls and tokens of one evaluation, and raises when a limit is reached.

    A call counts when it starts, even if it fails. The tokens of a call are known only from its
    reply, so concurrent calls can bring `tokens` above `max_tokens`. After that, no call starts.
    """

    def __init__(self, max_calls: int | None, max_tokens: int | None) -> None:
        """Set the limits; None means unlimited."""
        self.max_calls = max_calls
        self.max_tokens = max_tokens
        self.calls = 0
        self.tokens = 0

    def require_calls(self, questions: int) -> None:
        """Check, before any question is asked, that enough calls are left for all questions.

        Raises:
            JudgeError: there are more questions than calls left.
        """
        if self.max_calls is not None and questions > self.max_calls - self.calls:
            raise JudgeError(
                f"{questions} questions need at least {questions} calls, but {self.calls} of "
                f"judging.max_calls={self.max_calls} calls are already spent, so no question was "
                "asked. Raise judging.max_calls, or judge fewer pairs."
            )

    def start_call(self, left: int) -> None:
        """Count a call before it starts; `left` is the number of unanswered questions.

        Raises:
            JudgeError: the limit of calls or tokens is reached.
        """
        self._require_unspent("max_calls", self.calls, self.max_calls, left)
        self._require_unspent("max_tokens", self.tokens, self.max_tokens, left)
        self.calls += 1

    def add_tokens(self, tokens: int | None) -> None:
        """Add the tokens of a question and its reply; None if the server does not report them.

        Raises:
            JudgeError: `tokens` is None, and `max_tokens` is set.
        """
        if tokens is None and self.max_tokens is not None:
            raise JudgeError(
                f"judging.max_tokens={self.max_tokens} cannot be enforced, because the server's "
                "replies do not report their tokens ('usage'). Set judging.max_calls instead."
            )
        self.tokens += tokens or 0

    @staticmethod
    def _require_unspent(setting: str, spent: int, limit: int | None, left: int) -> None:
        if limit is not None and spent >= limit:
            raise JudgeError(
                f"The judge's budget is spent: {spent} of judging.{setting}={limit}, with {left} "
                f"questions left to ask. All replies are stored. Raise judging.{setting} and run "
                "again to ask only the remaining questions."
            )
