"""The limits on the cost of a paid judge."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
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


def read_spent(file: Path) -> dict[str, Spent]:
    """Return the calls and tokens in the file of a `Budget`, by name; {} if there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return sum_spent(*filter(None, map(_spent_in, lines)))


def _spent_in(line: str) -> Mapping[str, Spent]:
    """Return the calls and tokens in a line; none if a killed process left the line incomplete."""
    try:
        fields = json.loads(line)
        return {fields["name"]: Spent(calls=fields["calls"], tokens=fields["tokens"])}
    except (ValueError, KeyError, TypeError):
        return {}


class Budget:
    """Counts the calls and tokens of one evaluation, and raises when a limit is reached.

    A call counts when it starts, even if it fails. The tokens of a call are known only from its
    reply, so concurrent calls can bring `tokens` above `max_tokens`. After that, no call starts.
    """

    def __init__(
        self,
        max_calls: int | None,
        max_tokens: int | None,
        *,
        note: str = "",
        file: Path | None = None,
    ) -> None:
        """Set the limits; None means unlimited. Error messages show `note` after the limit.

        Each call is appended to `file`. The calls that the file already has count as well, so that
        the limits and `spent` cover all attempts of a step.
        """
        self.max_calls = max_calls
        self.max_tokens = max_tokens
        self._note = note
        self._file = file
        self._calls: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._unreported: set[str] = set()
        """Judges with a reply that did not report its tokens."""
        for name, earlier in (read_spent(file) if file else {}).items():
            self._count(name, earlier)
        self._calls_before = self.calls

    @classmethod
    def of(cls, config: "JudgingConfig", file: Path | None = None) -> "Budget":
        """Return a budget with the limits of the settings."""
        return cls(config.max_calls, config.max_tokens, file=file)

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

    @property
    def affordable(self) -> int | None:
        """Largest number of questions for which the calls may suffice; None if there is no limit.

        The questions of earlier attempts cost nothing, because their replies are stored.
        """
        return None if self.calls_left is None else self.calls_left + self._calls_before

    def require_calls(self, questions: int) -> None:
        """Check, before any question is asked, that enough calls are left for all questions.

        Raises:
            BudgetError: there are more questions than calls left.
        """
        if self.calls_left is not None and questions > self.calls_left:
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
        self._record(judge, Spent(calls=1, tokens=0))

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
        self._record(judge, Spent(calls=0, tokens=tokens))

    def _record(self, judge: str, new: Spent) -> None:
        self._count(judge, new)
        if self._file is not None:
            line = json.dumps({"name": judge, **asdict(new)})
            # Threads and processes append to the file, each line by one write. A killed process may
            # have left an incomplete line, so begin with a line break.
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")

    def _count(self, judge: str, new: Spent) -> None:
        self._calls[judge] += new.calls
        if new.tokens is None:
            self._unreported.add(judge)
        else:
            self._tokens[judge] += new.tokens

    def _require_unspent(self, setting: str, spent: int, limit: int | None, left: int) -> None:
        if limit is not None and spent >= limit:
            raise BudgetError(
                f"The budget is spent: {spent} used, and judging.{setting}={limit}{self._note}. "
                f"Questions left: {left}. All replies are stored. Raise "
                f"judging.{setting} and run again to ask only the remaining questions."
            )
