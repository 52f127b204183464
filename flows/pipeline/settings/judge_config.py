"""Settings of judges that are chat models."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ppo_core.config.field_checks import check_fields, require
from ppo_core.io.validation import Count, Natural, Positive


@dataclass(frozen=True, kw_only=True)
class JudgingConfig:
    """Settings for asking a chat model, and limits of the cost. Other judges ignore all of them.

    Raises:
        ConfigError: a value is out of range.
    """

    criterion: str = "Which answer is more helpful, correct and to the point?"
    """Criterion for the better answer, exactly as the judge reads it."""

    base_url: str = ""
    """Address of an OpenAI-compatible server, including `/v1`. If empty, OPENAI_BASE_URL is used;
    without OPENAI_BASE_URL, OpenAI's server. The API key is always read from OPENAI_API_KEY."""

    sampling: Literal["greedy", "default"] = "greedy"
    """`greedy` requests temperature 0. `default` sends no temperature, for servers that refuse
    requests with a temperature."""

    max_reply_tokens: Count = 512
    """Maximum number of tokens of one reply, including the judge's reasons."""

    attempts: Count = 3
    """Maximum number of times to ask a question. If no reply has a verdict, the question counts as
    invalid."""

    concurrency: Count = 8
    """Maximum number of simultaneous calls to a server, or the batch size of a local model."""

    deadline_seconds: Positive = 120.0
    """Timeout of one call in seconds, up to the last byte of the reply."""

    retries: Natural = 6
    """Maximum number of repetitions of a call that the server rejected (408, 409, 429, 5xx), whose
    connection failed, that exceeded `deadline_seconds`, or whose reply is not a chat completion or
    has no text. A reply without text because of `max_reply_tokens` or a content filter is not
    repeated. Waits grow, and are at least as long as the server's Retry-After."""

    max_calls: Annotated[int, Field(gt=0)] | None = None
    """Maximum number of calls to a server in one evaluation, including retries; if None, there is
    no limit."""

    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """Maximum number of question and reply tokens of a server in one evaluation; if None, there is
    no limit."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)
        require(self, "criterion", bool(self.criterion.strip()), "a sentence")
