"""Settings of judges that are chat models."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ppo_core.config.checks import check_fields, require
from ppo_core.io.validation import Count, Natural, Positive


@dataclass(frozen=True, kw_only=True)
class JudgingConfig:
    """How a chat model is asked, and the limits of its cost. Other judges ignore these settings.

    Raises:
        ConfigError: a value is out of range.
    """

    criterion: str = "Which answer is more helpful, correct and to the point?"
    """Criterion for the better answer, exactly as the judge reads it."""

    base_url: str = ""
    """Address of an OpenAI-compatible server, including `/v1`. If empty, OPENAI_BASE_URL is used,
    and without OPENAI_BASE_URL, OpenAI. The API key is always read from OPENAI_API_KEY."""

    sampling: Literal["greedy", "default"] = "greedy"
    """`greedy` requests temperature 0; `default` sends no temperature, for servers that refuse
    one."""

    max_reply_tokens: Count = 512
    """Maximum number of tokens of one reply, including the judge's reasons."""

    attempts: Count = 3
    """Maximum number of times to ask a question; without a verdict, the question is invalid."""

    concurrency: Count = 8
    """Maximum number of simultaneous calls to a server, or the batch size of a local model."""

    deadline_seconds: Positive = 120.0
    """Timeout of one call in seconds, until its last byte."""

    retries: Natural = 6
    """Maximum number of repetitions of a call that the server rejected (429, 5xx) or whose
    connection failed. Waits grow, and are at least as long as the server's Retry-After."""

    max_calls: Annotated[int, Field(gt=0)] | None = None
    """Maximum number of calls to a server in one evaluation, including retries; None for no
    limit."""

    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """Maximum number of question and reply tokens of a server in one evaluation; None for no
    limit."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        require(self, "criterion", bool(self.criterion.strip()), "a sentence")
