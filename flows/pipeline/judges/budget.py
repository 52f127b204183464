"""The limits on the cost of a paid judge."""

from ppo_core.errors import JudgeError


class Budget:
    """Counts the calls and the tokens of one evaluation, and raises beyond its limits.

    A call counts when it starts, even if it fails. Its tokens are known only with its reply, so
    the calls in flight can raise `tokens` above `max_tokens`; no call starts after that.
    """

    def __init__(self, max_calls: int | None, max_tokens: int | None) -> None:
        """Start with nothing spent; None is no limit."""
        self.max_calls = max_calls
        self.max_tokens = max_tokens
        self.calls = 0
        self.tokens = 0

    def require_calls(self, questions: int) -> None:
        """Raise if there are more questions than calls left, before any question is asked.

        Raises:
            JudgeError: there are.
        """
        if self.max_calls is not None and questions > self.max_calls - self.calls:
            raise JudgeError(
                f"{questions} questions need at least {questions} calls, and {self.calls} of the "
                f"{self.max_calls} calls of judging.max_calls are spent: none of them was asked. "
                "Raise judging.max_calls, or judge fewer pairs."
            )

    def start_call(self, left: int) -> None:
        """Count a call before it starts; `left` questions are unanswered.

        Raises:
            JudgeError: the calls or the tokens are spent.
        """
        self._require_unspent("max_calls", self.calls, self.max_calls, left)
        self._require_unspent("max_tokens", self.tokens, self.max_tokens, left)
        self.calls += 1

    def add_tokens(self, tokens: int | None) -> None:
        """Add the tokens of a question and its reply; None if the server does not report them.

        Raises:
            JudgeError: they are unknown, and `max_tokens` is set.
        """
        if tokens is None and self.max_tokens is not None:
            raise JudgeError(
                f"judging.max_tokens={self.max_tokens} cannot be held: the server does not report "
                "the tokens that a reply took ('usage'). Set judging.max_calls instead."
            )
        self.tokens += tokens or 0

    @staticmethod
    def _require_unspent(setting: str, spent: int, limit: int | None, left: int) -> None:
        if limit is not None and spent >= limit:
            raise JudgeError(
                f"The judge's budget is spent: {spent} of judging.{setting}={limit}, with {left} "
                f"questions left to ask. Replies so far are kept: raise judging.{setting} and run "
                "again to ask the rest."
            )
