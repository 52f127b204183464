"""Settings of judges that are chat models."""

from dataclasses import dataclass
from typing import Literal

from ppo_core.config.checks import require, require_count


@dataclass(frozen=True, kw_only=True)
class JudgingConfig:
    """How a chat model is asked, and the limits of its cost. Other judges ignore these settings.

    Raises:
        ConfigError: a value is out of range.
    """

    criterion: str = "Which answer is more helpful, correct and to the point?"
    """What makes one answer better than the other, in the words that the judge reads."""

    base_url: str = ""
    """Address of an OpenAI-compatible server, `/v1` included. Empty: the environment variable
    OPENAI_BASE_URL, or OpenAI itself. The key is always taken from OPENAI_API_KEY."""

    sampling: Literal["greedy", "default"] = "greedy"
    """`greedy` asks for temperature 0; `default` leaves it to the model: for servers that refuse to
    be told."""

    max_reply_tokens: int = 512
    """Most tokens of one reply, the judge's reasons included."""

    attempts: int = 3
    """Times that a question is asked before replies without a verdict make it invalid."""

    concurrency: int = 8
    """Calls under way at the same time; of a local model, questions answered together."""

    deadline_seconds: float = 120.0
    """Seconds that one call may take until its last byte."""

    retries: int = 6
    """Times that a call is repeated which the server turned away (429, 5xx) or that failed on the
    way; it waits longer each time, and at least as long as the server's Retry-After says."""

    max_calls: int | None = None
    """Calls that one evaluation may make to a server, repeated ones included; None for no limit."""

    max_tokens: int | None = None
    """Tokens of questions and replies that one evaluation may use there; None for no limit."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        for name in ("max_reply_tokens", "attempts", "concurrency"):
            require_count(self, name)
        require(self, "criterion", bool(self.criterion.strip()), "a sentence")
        require(self, "deadline_seconds", self.deadline_seconds > 0, "above 0")
        require(self, "retries", self.retries >= 0, "at least 0")
        for name in ("max_calls", "max_tokens"):
            value = getattr(self, name)
            require(self, name, value is None or value > 0, "above 0")
