"""The limits on the cost of a paid judge."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppo_core.errors import JudgeError

if TYPE_CHECKING:
    from pipeline.settings.judge_config import JudgingConfig


class BudgetError(JudgeError):
    """The judge's budget has too few calls or tokens left."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Calls and tokens that a judge has spent on a server."""

    calls: int

    tokens: int | None
    """Tokens of questions and replies; None if at least one reply did not report its tokens."""


def sum_spent(*parts: Mapping[str, Spent]) -> dict[str, Spent]:
    """Return the total of calls and tokens over all parts, by name of the judge."""
    spent: dict[str, Spent] = {}
    for name, more in (item for part in parts for item in part.items()):
        earlier = spent.get(name, Spent(calls=0, tokens=0))
        unknown = earlier.tokens is None or more.tokens is None
        tokens = None if unknown else (earlier.tokens or 0) + (more.tokens or 0)
        spent[name] = Spent(calls=earlier.calls + more.calls, tokens=tokens)
    return spent


@dataclass(frozen=True, kw_only=True)
class Payment:
    """What a run of the flow has spent to make a result that is in the cache."""

    run: str
    spent: dict[str, Spent]


def spent_by(run: str, payment: Payment | None) -> dict[str, Spent]:
    """Return what a run has spent on a cached result; {} if another run has made the result.

    A resumed run may reuse a result that it made, and paid for, before it was killed.
    """
    return payment.spent if payment is not None and payment.run == run else {}


class Budget:
    """Counts the calls and tokens of one evaluation, and raises when a limit is reached.

    A call counts when it starts, even if it fails. The tokens of a call are known only from its
    reply, so concurrent calls can bring `tokens` above `max_tokens`. After that, no call starts.
    """

    def __init__(self, max_calls: int | None, max_tokens: int | None, *, note: str = "") -> None:
        """Set the limits; None means unlimited. Error messages show `note` after the limit."""
        self.max_calls = max_calls
        self.max_tokens = max_tokens
        self._note = note
        self._calls: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._unreported: set[str] = set()
        """Judges with a reply that did not report its tokens."""

    @classmethod
    def of(cls, config: "JudgingConfig") -> "Budget":
        """Return a budget with the limits of the settings."""
        return cls(config.max_calls, config.max_tokens)

    @property
    def calls(self) -> int:
        """Number of calls of all judges."""
        return self._calls.total()

    @property
    def tokens(self) -> int:
        """Number of tokens of all judges, as far as the servers report them."""
        return self._tokens.total()

    def spent(self, before: Mapping[str, Spent]) -> dict[str, Spent]:
        """Return the calls and tokens by name of the judge, including `before`."""
        own = {
            name: Spent(
                calls=calls, tokens=None if name in self._unreported else self._tokens[name]
            )
            for name, calls in self._calls.items()
        }
        return sum_spent(before, own)

    @property
    def calls_left(self) -> int | None:
        """Number of calls that are left; None if there is no limit."""
        return None if self.max_calls is None else self.max_calls - self.calls

    def allows(self, questions: int) -> bool:
        """Return whether enough calls are left for all questions."""
        return self.calls_left is None or questions <= self.calls_left

    def require_calls(self, questions: int) -> None:
        """Check, before any question is asked, that enough calls are left for all questions.

        Raises:
            BudgetError: there are more questions than calls left.
        """
        if not self.allows(questions):
            raise BudgetError(
                f"{questions} questions need at least {questions} calls, but only "
                f"{self.calls_left} of judging.max_calls={self.max_calls}{self._note} are left. "
                "These questions were not asked. Raise judging.max_calls."
            )

    def start_call(self, judge: str, left: int) -> None:
        """Count a call of a judge before it starts; `left` is the number of unanswered questions.

        Raises:
            BudgetError: the limit of calls or tokens is reached.
        """
        self._require_unspent("max_calls", self.calls, self.max_calls, left)
        self._require_unspent("max_tokens", self.tokens, self.max_tokens, left)
        self._calls[judge] += 1

    def add_tokens(self, judge: str, tokens: int | None) -> None:
        """Add the tokens of a judge's question and reply; None if the server does not report them.

        Raises:
            JudgeError: `tokens` is None, and `max_tokens` is set.
        """
        if tokens is None and self.max_tokens is not None:
            raise JudgeError(
                f"judging.max_tokens={self.max_tokens} cannot be enforced, because the server's "
                "replies do not report their tokens ('usage'). Set judging.max_calls instead."
            )
        if tokens is None:
            self._unreported.add(judge)
        else:
            self._tokens[judge] += tokens

    def _require_unspent(self, setting: str, spent: int, limit: int | None, left: int) -> None:
        if limit is not None and spent >= limit:
            raise BudgetError(
                f"The budget is spent: {spent} used, and judging.{setting}={limit}{self._note}. "
                f"Questions left: {left}. All replies are stored. Raise "
                f"judging.{setting} and run again to ask only the remaining questions."
            )
